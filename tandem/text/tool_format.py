"""How tool calls are written in text: the contract of the plug-in kind ``parser``, and the built-in table.

Owns: choosing a format for a model. Refuses: tokens (``render``), running tools (``envs``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.core.errors import ConfigError, PluginError
from tandem.core.registry import Registry
from tandem.core.types import ToolCall, ToolFailure, ToolResult, ToolSpec
from tandem.text.call_stream import CallStream

BUILTIN = {
    "fence": "tandem.text.parsers.fence:FORMAT",
    "gemma": "tandem.text.parsers.pythonic:GEMMA",
    "hermes": "tandem.text.parsers.hermes:FORMAT",
    "json": "tandem.text.parsers.llama:JSON",
    "llama": "tandem.text.parsers.llama:FORMAT",
    "pythonic": "tandem.text.parsers.pythonic:FORMAT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """What a model's text says: the words outside of calls, the calls, and the calls that can not be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    failures: tuple[ToolResult, ...] = ()


class ToolFormat(Protocol):
    """One way to write calls. Pure functions of text."""

    @property
    def name(self) -> str: ...

    @property
    def opening(self) -> str:
        """What every call begins with; text before it is never part of a call."""
        ...

    @property
    def lead(self) -> str:
        """What may stand right before the first call and belongs to it (the bracket of a list of calls); else empty."""
        ...

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Raise ``ConfigError`` naming a tool that can not be written in this format."""
        ...

    def is_native(self, chat_template: str) -> bool:
        """Whether the model's own template explains tools and writes calls in this format."""
        ...

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        """What a system message says about the tools, for a model whose template does not."""
        ...

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        """The text of an assistant turn with these calls: what ``parse`` reads back."""
        ...

    def write_result(self, content: str) -> str:
        """A tool's output as a user message shows it, for a model whose template has no role for tools."""
        ...

    def grammar(self, tools: Sequence[ToolSpec], *, several: bool) -> str:
        """A grammar (llguidance's Lark) of answers that are one call of these tools, or ``several``, and nothing else.

        Raises:
            ConfigError: this format has none.
        """
        ...

    def follow(self, tools: Sequence[ToolSpec]) -> CallStream:
        """Reads calls while they are written. It gets the text behind any thoughts, from its beginning. What it tells
        agrees with ``parse``, but for calls that are cut or broken."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedText:
        """Find the calls in an assistant's text; an unreadable or unfinished one is a failure, not an error."""
        ...


def find_format(name: str, *, chat_template: str | None) -> tuple[ToolFormat, bool]:
    """The format called ``name`` and whether the template speaks it; ``auto``: the template's own, else ``fence``."""
    registry = Registry("parser", BUILTIN)
    for candidate in registry.names() if name == "auto" else [name]:
        try:
            found: ToolFormat = registry.resolve(candidate)  # type: ignore[assignment]
        except PluginError as error:
            raise ConfigError(f"model.tool_format: {error.message}", hint=error.hint) from error
        native = chat_template is not None and found.is_native(chat_template)
        if native or name != "auto":
            return found, native
    return find_format("fence", chat_template=chat_template)


def unreadable(index: int, name: str, why: str, failure: ToolFailure = ToolFailure.UNPARSEABLE) -> ToolResult:
    """The answer to a call that could not be read; ``index`` is its place among the turn's calls."""
    return ToolResult(call_id=call_id(index), name=name, content=f"Error: {why}", failure=failure)


# Blanks as ``json.dumps`` writes them: a model that may go on with blanks for ever does.
PLAIN_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_grammar(tools: Sequence[ToolSpec], *, before: str, key: str, after: str, between: str) -> str:
    """The grammar of calls that are JSON objects of ``name`` and, under ``key``, arguments. Empty ``between``: one."""
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: tool.parameters},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    body = {"anyOf": kinds, "x-guidance": PLAIN_JSON}
    words = [json.dumps(before), "body", json.dumps(after)]
    call = " ".join(word for word in words if word != '""')
    more = f" ({json.dumps(between)} call)*" if between else ""
    return f"start: call{more}\ncall: {call}\nbody: %json {json.dumps(body)}\n"


def arguments_text(call: ToolCall) -> str:
    """The arguments as JSON, or what stands in their place."""
    return json.dumps(call.arguments, ensure_ascii=False) if call.unread is None else call.unread


def call_id(index: int) -> str:
    """The id of a turn's n-th call, good or bad."""
    return f"call_{index}"


def after_reasoning(text: str) -> int:
    """Where the answer of a reasoning model begins: calls inside ``<think>`` are thoughts, not calls."""
    end = text.rfind("</think>")
    if end >= 0:
        return end + len("</think>")
    return len(text) if text.lstrip().startswith("<think>") else 0
