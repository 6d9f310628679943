"""Calls as bare JSON objects with ``name`` and ``parameters``: what Llama 3.1 and later were trained on; or
``arguments``: plain JSON, for a model of no known format.

The whole answer, or its end, is one object or several with semicolons or line ends between them, perhaps after
``<|python_tag|>``; plain JSON also as one list. A JSON object that names no tool on offer is the answer's own text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from tandem.core.types import ToolCall, ToolFailure, ToolResult, ToolSpec
from tandem.text.parsers.json_calls import JsonCalls
from tandem.text.tool_format import ParsedText, after_reasoning, arguments_text, call_grammar, call_id, unreadable

TAG = "<|python_tag|>"
BETWEEN = "; \t\r\n"


class Llama:
    """``key``: what the arguments are written under; both words are read."""

    opening = "{"

    def __init__(self, name: str, key: str) -> None:
        self.name, self._key = name, key
        self.lead = "[" if key == "arguments" else TAG  # plain JSON: a list of calls is calls

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Every JSON schema can be written."""

    def is_native(self, chat_template: str) -> bool:
        if self._key != "parameters":
            return False  # no template is known by it
        return "tools" in chat_template and '"parameters": dictionary of argument name' in chat_template

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n".join(
            json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                       ensure_ascii=False) for tool in tools
        )  # fmt: skip
        return (
            f"You may call these functions:\n{listed}\n"
            'To call one, answer with nothing but {"name": <name>, "' + self._key + '": <object of arguments>}'
        )

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        parts = [content] if content else []
        for call in calls:
            name = json.dumps(call.name, ensure_ascii=False)
            parts.append(f'{{"name": {name}, "{self._key}": {arguments_text(call)}}}')
        return "\n".join(parts)

    def write_result(self, content: str) -> str:
        return f"Output:\n{content}"

    def grammar(self, tools: Sequence[ToolSpec], *, several: bool) -> str:
        return call_grammar(tools, before="", key=self._key, after="", between="\n" if several else "")

    def follow(self, tools: Sequence[ToolSpec]) -> JsonCalls:
        return JsonCalls(keys=["parameters", "arguments"], names={tool.name for tool in tools})

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedText:
        names = {tool.name for tool in tools}
        calls: list[ToolCall] = []
        failures: list[ToolResult] = []
        begin = after_reasoning(text)
        place = text.find("{", begin)
        outside = len(text)
        decoder = json.JSONDecoder()
        while 0 <= place < len(text):
            index = len(calls) + len(failures)
            try:
                value, end = decoder.raw_decode(text, place)
                msgspec.msgpack.encode(value)  # what reads, but no record can hold
            except (ValueError, RecursionError, OverflowError) as error:
                if calls or _begins_call(text, place):
                    outside = min(outside, place)
                    failures.append(unreadable(index, "", f"the call is not valid JSON: {str(error)[:200]}"))
                    break
                place = text.find("{", place + 1)
                continue
            if not isinstance(value, dict) or value.get("name") not in names or not isinstance(value["name"], str):
                place = text.find("{", end)  # an object of the answer's own
                continue
            outside = min(outside, place)
            arguments = value.get("parameters", value.get("arguments", {}))
            if isinstance(arguments, dict):
                calls.append(ToolCall(id=call_id(index), name=value["name"], arguments=arguments))
            else:
                problem = f'"{self._key}" is not an object'
                failures.append(unreadable(index, value["name"], problem, ToolFailure.BAD_ARGUMENTS))
            while end < len(text) and text[end] in BETWEEN:
                end += 1
            place = end if text[end : end + 1] == "{" else text.find("{", end)
        if not calls and not failures:
            return ParsedText(content=text)
        content = text[:outside].strip().removesuffix(self.lead).strip()
        return ParsedText(content=content, calls=tuple(calls), failures=tuple(failures))


def _begins_call(text: str, place: int) -> bool:
    return text[place + 1 :].lstrip().startswith('"name"')


FORMAT = Llama("llama", "parameters")
JSON = Llama("json", "arguments")
