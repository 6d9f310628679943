"""Typed tools from function signatures, and the two stock tools that run in the episode's box.

Owns: the schema the model is told, the check of its arguments, the deadline, the cap on what it is shown, and
the typed outcome. Refuses: raising for anything a model can cause (a wrong call is a ``ToolResult``).
Invariant: a lost box is not a tool outcome; ``SandboxError`` passes through to the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import get_type_hints

import msgspec

from tandem.core.errors import EpisodeError, PluginError, SandboxError, TandemError, boundary
from tandem.core.protocols import Sandbox
from tandem.core.types import ToolCall, ToolFailure, ToolResult, ToolSpec
from tandem.core.wire import storable
from tandem.envs.foreign import describe

MAX_CHARS = 2000
GRACE_S = 0.5  # a command with the tool's own deadline gets to report its partial output
SUPPLIED = ("box", "time_s")  # parameters that the loop fills in; the model never sees them


class ToolError(EpisodeError):
    """Raised in a tool to end a call with a typed failure; the message is what the model is shown."""

    def __init__(self, message: str, *, failure: ToolFailure = ToolFailure.RAISED, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.message, self.failure, self.hint))


def _rebuild(message: str, failure: ToolFailure, hint: str) -> ToolError:
    return ToolError(message, failure=failure, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as the loop uses it; made by ``tool``."""

    spec: ToolSpec
    function: Callable[..., Awaitable[str]]
    arguments: type[msgspec.Struct]
    supplied: tuple[str, ...]
    max_chars: int = MAX_CHARS

    async def call(self, call: ToolCall, *, box: Sandbox | None, time_s: float) -> ToolResult:
        """Run one call of the model to its typed end, within ``time_s``."""
        start = time.perf_counter()
        try:
            content, failure = await self._run(call, box, time_s), None
        except ToolError as error:
            content, failure = error.message, error.failure
        return ToolResult(
            call_id=call.id,
            name=call.name,
            content=storable(cap(content, self.max_chars)),
            failure=failure,
            duration_s=time.perf_counter() - start,
        )

    async def _run(self, call: ToolCall, box: Sandbox | None, time_s: float) -> str:
        try:
            arguments = msgspec.structs.asdict(msgspec.convert(call.arguments, self.arguments))
        except msgspec.ValidationError as error:
            text = f"bad arguments for {call.name}: {error}"
            raise ToolError(text, failure=ToolFailure.BAD_ARGUMENTS) from error
        available = {"box": box, "time_s": time_s}
        for name in self.supplied:
            if available[name] is None:
                raise PluginError(f"tool {call.name} wants a box, but the environment has template=None")
            arguments[name] = available[name]
        deadline = asyncio.timeout(time_s + GRACE_S)
        try:
            async with deadline:
                output = await self.function(**arguments)
        except SandboxError:
            raise  # the box is lost, whatever the clock says
        except (Exception, SystemExit) as error:  # the boundary to the user's code, which must name its line
            if deadline.expired():
                raise ToolError(f"[timed out after {time_s:g} s]", failure=ToolFailure.TIMEOUT) from error
            if isinstance(error, TandemError):
                raise
            raise ToolError(f"tool {call.name} failed: {describe(error)}") from error
        if not isinstance(output, str):
            raise ToolError(f"tool {call.name} failed: it returned {type(output).__name__}, not text")
        return output


def tool(function: Callable[..., Awaitable[str]], *, name: str = "", max_chars: int = MAX_CHARS) -> Tool:
    """Make a tool of an ``async`` function: its name, first paragraph and typed parameters are what the model
    is told. Parameters named ``box`` and ``time_s`` are supplied by the loop. Also usable as a decorator.

    Raises:
        PluginError: the function is not async, has no docstring, or has a parameter without a usable type.
    """
    name = name or getattr(function, "__name__", "")
    if not inspect.iscoroutinefunction(function):
        raise PluginError(
            f"tool {name or function!r} is not an async function",
            hint="write `async def`; blocking code would stop every other episode",
        )
    description = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    if not description:
        raise PluginError(f"tool {name} has no docstring", hint="its first paragraph is what the model is told")
    with boundary(PluginError, f"tool {name}: its annotations do not resolve"):
        hints = get_type_hints(function)
    fields: list[tuple] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in SUPPLIED:
            continue
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PluginError(f"tool {name}: {parameter.name!r} needs a type", hint=f"such as `{parameter.name}: str`")
        field = (parameter.name, hints[parameter.name])
        fields.append(field if parameter.default is parameter.empty else (*field, parameter.default))
    with boundary(PluginError, f"tool {name}: a parameter's type has no JSON form"):
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        schema = _object_schema(arguments)
    parameters = inspect.signature(function).parameters
    return Tool(
        spec=ToolSpec(name=name, description=description, parameters=schema),
        function=function,
        arguments=arguments,
        supplied=tuple(key for key in SUPPLIED if key in parameters),
        max_chars=max_chars,
    )


def _object_schema(arguments: type[msgspec.Struct]) -> dict[str, object]:
    _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    schema = dict(components.pop(arguments.__name__))
    schema.pop("title", None)
    return {**schema, "$defs": components} if components else schema


def cap(text: str, max_chars: int) -> str:
    """At most about ``max_chars`` of a text: its beginning and its end, and how much was left out between."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars * 2 // 3, max_chars // 3
    return f"{text[:head]}\n[{len(text) - head - tail} characters left out]\n{text[len(text) - tail :]}"


async def run_command(box: Sandbox, command: str | Sequence[str], *, time_s: float, stdin: str = "") -> str:
    """Run a command in the box and return what it printed, for use in tools.

    Raises:
        ToolError: it exited non-zero, ran out of time or memory, or flooded its output; the message holds the
            output so far and says which, in square brackets on the last line. Or it is no command (a NUL in it).
    """
    try:
        result = await box.commands.run(command, timeout_s=time_s, stdin=stdin.encode("utf-8", "replace"))
    except ValueError as error:  # a NUL or half a surrogate pair, say: no command at all
        raise ToolError(f"[not a command: {error}]", failure=ToolFailure.BAD_ARGUMENTS) from error
    output = result.stdout
    if result.stderr:
        output = f"{output.rstrip()}\n{result.stderr}" if output.strip() else result.stderr
    output = output.strip("\n")
    if result.oom_killed:
        failure, note = ToolFailure.RESOURCE_LIMIT, "[killed: out of memory]"
    elif result.timed_out:
        failure, note = ToolFailure.TIMEOUT, f"[timed out after {time_s:g} s]"
    elif result.truncated:
        failure, note = ToolFailure.OUTPUT_LIMIT, f"[too much output: {result.dropped_bytes} more bytes dropped]"
    elif result.exit_code != 0:
        failure, note = ToolFailure.NONZERO_EXIT, f"[exit code {result.exit_code}]"
    else:
        return output or "[no output]"
    # The note must survive the cap, so the output is cut first.
    raise ToolError(f"{cap(output, MAX_CHARS - 200)}\n{note}".lstrip("\n"), failure=failure)


async def python(box: Sandbox, code: str, time_s: float) -> str:
    """Runs Python code and returns what it prints."""
    return await run_command(box, ["python3", "-"], time_s=time_s, stdin=code)


async def shell(box: Sandbox, command: str, time_s: float) -> str:
    """Runs a shell command and returns its output."""
    return await run_command(box, command, time_s=time_s)


STOCK = {"python": python, "shell": shell}


def resolve_tools(tools: Sequence[Tool | str | Callable[..., Awaitable[str]]]) -> tuple[Tool, ...]:
    """Tools from stock names, functions and tools; names must differ.

    Raises:
        PluginError: an unknown stock name (the known ones are listed), or two tools of one name.
    """
    resolved: dict[str, Tool] = {}
    for entry in tools:
        if isinstance(entry, str):
            if entry not in STOCK:
                raise PluginError(f"no stock tool named {entry!r}", hint=f"stock tools: {', '.join(STOCK)}")
            entry = STOCK[entry]
        made = entry if isinstance(entry, Tool) else tool(entry)
        if made.spec.name in resolved:
            raise PluginError(f"two tools are named {made.spec.name!r}")
        resolved[made.spec.name] = made
    return tuple(resolved.values())
