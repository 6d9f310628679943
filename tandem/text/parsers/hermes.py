"""Calls as JSON between ``<tool_call>`` tags: what Hermes, Qwen and many others were trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from tandem.core.types import ToolCall, ToolFailure, ToolResult, ToolSpec
from tandem.core.wire import storable
from tandem.text.parsers.json_calls import JsonCalls
from tandem.text.tool_format import ParsedText, after_reasoning, arguments_text, call_grammar, call_id, unreadable

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _describe(tool: ToolSpec) -> str:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _end_of_body(text: str, start: int) -> int:
    """Where the closing tag of a call's body stands, -1: nowhere. A tag inside a JSON string does not close."""
    body = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, body)
    except (ValueError, RecursionError):
        return text.find(_CLOSE, start)
    return text.find(_CLOSE, end)


def _read(body: str, index: int) -> ToolCall | ToolResult:
    try:
        value = json.loads(body)
        msgspec.msgpack.encode(value)  # half a surrogate pair or a huge number reads, but no record can hold it
    except (ValueError, RecursionError, OverflowError) as error:
        return unreadable(index, "", storable(f"the call is not valid JSON: {error}"))
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return unreadable(index, "", 'a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return unreadable(index, value["name"], '"arguments" is not an object', ToolFailure.BAD_ARGUMENTS)
    return ToolCall(id=call_id(index), name=value["name"], arguments=arguments)


class Hermes:
    name = "hermes"
    opening = _OPEN
    lead = ""

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Every JSON schema can be written."""

    def is_native(self, chat_template: str) -> bool:
        return "tools" in chat_template and _OPEN in chat_template

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n".join(_describe(tool) for tool in tools)
        return (
            f"You may call these tools:\n<tools>\n{listed}\n</tools>\n"
            f'For each call, write:\n{_OPEN}\n{{"name": <name>, "arguments": <object>}}\n{_CLOSE}'
        )

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        parts = [content] if content else []
        for call in calls:
            name = json.dumps(call.name, ensure_ascii=False)
            parts.append(f'{_OPEN}\n{{"name": {name}, "arguments": {arguments_text(call)}}}\n{_CLOSE}')
        return "\n".join(parts)

    def write_result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def grammar(self, tools: Sequence[ToolSpec], *, several: bool) -> str:
        between = "\n" if several else ""
        return call_grammar(tools, before=f"{_OPEN}\n", key="arguments", after=f"\n{_CLOSE}", between=between)

    def follow(self, tools: Sequence[ToolSpec]) -> JsonCalls:
        return JsonCalls(opening=_OPEN, closing=_CLOSE, keys=["arguments"])

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedText:
        calls: list[ToolCall] = []
        failures: list[ToolResult] = []
        position = after_reasoning(text)
        outside = [text[:position]]
        while (start := text.find(_OPEN, position)) >= 0:
            outside.append(text[position:start])
            index = len(calls) + len(failures)
            end = _end_of_body(text, start + len(_OPEN))
            if end < 0:
                failures.append(unreadable(index, "", f"the call was not closed with {_CLOSE}"))
                position = len(text)
                break
            read = _read(text[start + len(_OPEN) : end], index)
            if isinstance(read, ToolCall):
                calls.append(read)
            else:
                failures.append(read)
            position = end + len(_CLOSE)
        outside.append(text[position:])
        content = "".join(outside).strip() if calls or failures else text
        return ParsedText(content=content, calls=tuple(calls), failures=tuple(failures))


FORMAT = Hermes()
