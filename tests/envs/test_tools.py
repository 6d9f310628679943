"""Tools from signatures: what the model is told, what its arguments must be, and the typed ends of a call."""

import asyncio
import pickle
import time
from typing import Literal

import pytest

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import PluginError, SandboxGone
from tandem.core.types import ToolCall, ToolFailure
from tandem.envs.tools import ToolError, cap, resolve_tools, tool
from tandem.sandbox.manager import SandboxManager


class Quiet:
    def emit(self, event, *, cause=-1):
        return 0

    def put_blob(self, data):
        return ""


async def search(query: str, limit: int = 3, mode: Literal["fast", "deep"] = "fast") -> str:
    """Finds pages
    by their words.

    Not for the model.
    """
    return f"{query} {limit} {mode}"


def call_of(name="search", **arguments):
    return ToolCall(id="call_0", name=name, arguments=arguments)


def result_of(made, *, time_s=1.0, box=None, **arguments):
    return asyncio.run(made.call(call_of(made.spec.name, **arguments), box=box, time_s=time_s))


def test_the_schema_comes_from_the_signature():
    spec = tool(search).spec
    assert (spec.name, spec.description) == ("search", "Finds pages by their words.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer", "default": 3},
            "mode": {"enum": ["deep", "fast"], "default": "fast"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_arguments_are_checked():
    assert result_of(tool(search), query="a", limit=2).content == "a 2 fast"
    for wrong, named in [({}, "query"), ({"query": 1}, "str"), ({"query": "a", "more": 1}, "more"),
                         ({"query": "a", "mode": "slow"}, "slow")]:  # fmt: skip
        result = result_of(tool(search), **wrong)
        assert result.failure is ToolFailure.BAD_ARGUMENTS and named in result.content
        assert result.call_id == "call_0"


def test_what_is_no_tool_is_refused():
    def sync(text: str) -> str:
        """Sync."""
        return text

    async def bare(text: str) -> str:
        return text

    async def untyped(text) -> str:
        """Untyped."""
        return text

    async def strange(text: asyncio.Event) -> str:
        """Strange."""
        return ""

    for function, said in [(sync, "async"), (bare, "docstring"), (untyped, "'text' needs a type"),
                           (strange, "no JSON form")]:  # fmt: skip
        with pytest.raises(PluginError, match=said):
            tool(function)
    with pytest.raises(PluginError, match="no stock tool named 'bash'") as raised:
        resolve_tools(["bash"])
    assert "python, shell" in raised.value.hint
    with pytest.raises(PluginError, match="two tools are named 'search'"):
        resolve_tools([search, tool(search)])


def test_ends_of_a_call():
    async def number(text: str) -> str:
        """Returns a number."""
        return 3

    async def stubborn(text: str) -> str:
        """Makes its own error of a cancellation."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("cleaned up") from None
        return ""

    async def own_timeout(text: str) -> str:
        """Runs into a timeout of its own."""
        raise TimeoutError("mine")

    async def typed(text: str) -> str:
        """Ends typed."""
        raise ToolError("no such page", failure=ToolFailure.BAD_ARGUMENTS)

    async def gone(text: str) -> str:
        """Loses its box."""
        raise SandboxGone("box b1 is gone")

    ends = [(number, ToolFailure.RAISED, "not text"), (stubborn, ToolFailure.TIMEOUT, "[timed out after 0.1 s]"),
            (own_timeout, ToolFailure.RAISED, "TimeoutError: mine (test_tools.py:"),
            (typed, ToolFailure.BAD_ARGUMENTS, "no such page")]  # fmt: skip
    for function, failure, content in ends:
        result = result_of(tool(function), text="x", time_s=0.1)
        assert result.failure is failure and content in result.content
    with pytest.raises(SandboxGone):
        result_of(tool(gone), text="x")
    copy = pickle.loads(pickle.dumps(ToolError("m", failure=ToolFailure.TIMEOUT)))
    assert (copy.message, copy.failure) == ("m", ToolFailure.TIMEOUT)


def test_what_the_model_is_shown_can_be_recorded():
    async def names(text: str) -> str:
        """Lists names that are no UTF-8."""
        return b"a\xff".decode("utf-8", "surrogateescape")

    async def fails(text: str) -> str:
        """Fails with such a name."""
        raise ValueError(await names(text))

    for function in (names, fails):
        assert "a?" in result_of(tool(function), text="x").content.encode().decode()


def test_a_long_output_keeps_both_ends():
    assert cap("short", 10) == "short"
    cut = cap("a" * 500 + "b" * 500, 90)
    assert cut.startswith("a" * 60 + "\n[910 characters left out]\n") and cut.endswith("b" * 30)


def test_stock_tools_in_a_real_box():
    python, shell = resolve_tools(["python", "shell"])
    flood = "import sys\nfor _ in range(20000): sys.stdout.write('x' * 1000)"
    calls = [
        (python, "code", "print(6 * 7)"),
        (shell, "command", "echo hi > f; cat f; ls"),
        (python, "code", "print('before')\n1 / 0"),
        (shell, "command", "exit 7"),
        (python, "code", "pass"),
        (python, "code", flood),
        (shell, "command", "echo begun; sleep 100"),
        (python, "code", "x = bytearray(10**9)\nprint(len(x))"),
        (python, "code", "print(open('f').read())"),
        (shell, "command", "echo \0 > f"),  # a model's slip must not count as a lost box
        (shell, "command", "echo \ud800"),
    ]

    async def run():
        manager = SandboxManager(SandboxSection(), Quiet())
        try:
            box = await manager.create(SandboxSpec(limits=SandboxLimits(memory_bytes=128 * 2**20, output_bytes=10_000)))
            return [
                await made.call(ToolCall(id="c", name=made.spec.name, arguments={key: text}), box=box, time_s=2.0)
                for made, key, text in calls
            ]
        finally:
            await manager.close()

    start = time.monotonic()
    results = asyncio.run(run())
    assert time.monotonic() - start < 60
    contents = [result.content for result in results]
    failures = [result.failure for result in results]
    assert contents[0] == "42" and contents[1] == "hi\nf" and contents[4] == "[no output]" and contents[8] == "hi"
    assert contents[2].startswith("before\nTraceback")
    assert contents[2].endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert contents[3] == "[exit code 7]"
    assert contents[6] == "begun\n[timed out after 2 s]"
    assert "more bytes dropped]" in contents[5] and len(contents[5]) <= 2000
    assert failures[:5] == [None, None, ToolFailure.NONZERO_EXIT, ToolFailure.NONZERO_EXIT, None]
    assert failures[5] is ToolFailure.OUTPUT_LIMIT and failures[6] is ToolFailure.TIMEOUT
    assert failures[7] in (ToolFailure.RESOURCE_LIMIT, ToolFailure.NONZERO_EXIT)  # killed, or refused the memory
    assert failures[8] is None
    assert failures[9:] == [ToolFailure.BAD_ARGUMENTS] * 2 and "NUL" in contents[9]
