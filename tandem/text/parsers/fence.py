"""Calls as fenced blocks: three backticks and the tool's name, the argument as it is, three backticks.

For models that were never shown a tool format: nothing is quoted or escaped, so that a small model needs to
learn little. Only tools with exactly one required parameter, a string, can be written so. A block with another
name is not a call (a model may show code). A line of three backticks ends a block; a body that holds such a line
is written between longer fences, and a block ends at a fence as long as the one that opened it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tandem.core.errors import ConfigError
from tandem.core.types import ToolCall, ToolResult, ToolSpec
from tandem.text.parsers.fence_calls import FenceCalls
from tandem.text.tool_format import ParsedText, after_reasoning, call_id, unreadable

_OPEN = re.compile(r"^(`{3,})([A-Za-z0-9_.-]+)[ \t]*(?:\n|\Z)", re.MULTILINE)
_FENCE_LINE = re.compile(r"^(`{3,})[ \t]*$", re.MULTILINE)


def _parameter(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and len(required) == 1:
        schema = properties.get(required[0])
        if isinstance(schema, dict) and schema.get("type") == "string":
            return str(required[0])
    raise ConfigError(
        f"tool {tool.name!r} does not fit the tool format 'fence': it needs exactly one required string parameter",
        hint="set model.tool_format = 'hermes', or give the tool one string parameter",
    )


def _find_close(text: str, start: int, fence: str) -> re.Match[str] | None:
    return next((found for found in _FENCE_LINE.finditer(text, start) if len(found.group(1)) >= len(fence)), None)


class Fence:
    name = "fence"
    opening = "```"
    lead = ""

    def check(self, tools: Sequence[ToolSpec]) -> None:
        for tool in tools:
            _parameter(tool)

    def is_native(self, chat_template: str) -> bool:
        return False

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        lines = ["To use a tool, write only its block; then you see the output."]
        lines += [f"```{tool.name}\n<{_parameter(tool)}>\n```\n{tool.description}" for tool in tools]
        return "\n".join(lines)

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        parameters = {tool.name: _parameter(tool) for tool in tools}
        parts = [content] if content else []
        for call in calls:
            # A call of a tool that is not offered (history of another run) still shows its one argument.
            name = parameters.get(call.name) or next(iter(call.arguments), "")
            body = str(call.arguments.get(name, "")) if call.unread is None else call.unread
            inside = [len(found.group(1)) for found in _FENCE_LINE.finditer(body)]
            fence = "`" * max([3, *(length + 1 for length in inside)])
            parts.append(f"{fence}{call.name}\n{body}\n{fence}")
        return "\n".join(parts)

    def write_result(self, content: str) -> str:
        return f"Output:\n{content}"

    def grammar(self, tools: Sequence[ToolSpec], *, several: bool) -> str:
        opening = " | ".join(json.dumps(f"```{tool.name}\n") for tool in tools)
        more = ' ("\\n" call)*' if several else ""
        # No backtick in the argument: where it ends must be plain.
        return f'start: call{more}\ncall: opening /[^`]*\\n```/\nopening: {opening}\n'

    def follow(self, tools: Sequence[ToolSpec]) -> FenceCalls:
        return FenceCalls({tool.name: _parameter(tool) for tool in tools})

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedText:
        parameters = {tool.name: _parameter(tool) for tool in tools}
        calls: list[ToolCall] = []
        failures: list[ToolResult] = []
        position = after_reasoning(text)
        outside = [text[:position]]
        while opening := _OPEN.search(text, position):
            fence, name = opening.groups()
            closing = _find_close(text, opening.end(), fence)
            end = closing.end() if closing else len(text)
            if name not in parameters:
                outside.append(text[position:end])
            else:
                outside.append(text[position : opening.start()])
                index = len(calls) + len(failures)
                if closing is None:
                    failures.append(unreadable(index, name, f"the block was not closed with {fence} on its own line"))
                else:
                    body = text[opening.end() : closing.start()].removesuffix("\n")
                    calls.append(ToolCall(id=call_id(index), name=name, arguments={parameters[name]: body}))
            position = end
        outside.append(text[position:])
        content = "".join(outside).strip() if calls or failures else text
        return ParsedText(content=content, calls=tuple(calls), failures=tuple(failures))


FORMAT = Fence()
