"""Calls as Python: ``[tool(argument=1), other(text="x")]`` (Llama 3.2 and 4), or the same in a ``tool_code`` block
(Gemma). Arguments are literals; nothing is ever run.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Sequence

from tandem.core.errors import ConfigError
from tandem.core.types import ToolCall, ToolFailure, ToolResult, ToolSpec
from tandem.text.parsers.python_calls import UNREADABLE, PythonCalls, plain_value
from tandem.text.tool_format import PLAIN_JSON, ParsedText, after_reasoning, call_id, unreadable

_BLOCK = re.compile(r"```tool_code[ \t]*\n(.*?)(?:\n```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


class _Unreadable(Exception):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name, self.why = name, why


class Pythonic:
    """``fenced``: in a block, one call a line; else in one list."""

    def __init__(self, name: str, *, fenced: bool) -> None:
        self.name = name
        self._fenced = fenced
        self.opening = "```tool_code" if fenced else "["
        self.lead = ""

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Every JSON schema can be written."""

    def is_native(self, chat_template: str) -> bool:
        if self._fenced:
            return "tool_code" in chat_template
        return "tools" in chat_template and "func_name1(params_name1" in chat_template

    def explain(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n".join(_signature(tool) for tool in tools)
        how = "```tool_code\nname(argument=value)\n```" if self._fenced else "[name(argument=value)]"
        return f"You may call these functions:\n{listed}\nTo call, write Python with named arguments:\n{how}"

    def write(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        parts = [content] if content else []
        written = [f"{call.name}({_arguments(call)})" for call in calls]
        if written and self._fenced:
            parts.append("```tool_code\n" + "\n".join(written) + "\n```")
        elif written:
            parts.append(f"[{', '.join(written)}]")
        return "\n".join(parts)

    def write_result(self, content: str) -> str:
        return f"```tool_output\n{content}\n```" if self._fenced else f"Output:\n{content}"

    def grammar(self, tools: Sequence[ToolSpec], *, several: bool) -> str:
        rules = [rule for number, tool in enumerate(tools) for rule in _call_rules(number, tool)]
        begin, between, end = ("```tool_code\n", "\n", "\n```") if self._fenced else ("[", ", ", "]")
        more = f" ({json.dumps(between)} call)*" if several else ""
        anyone = " | ".join(f"call{number}" for number in range(len(tools)))
        start = f"start: {json.dumps(begin)} call{more} {json.dumps(end)}"
        return "\n".join([start, f"call: {anyone}", *rules]) + "\n"

    def follow(self, tools: Sequence[ToolSpec]) -> PythonCalls:
        return PythonCalls(fenced=self._fenced, names={tool.name for tool in tools})

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedText:
        names = {tool.name for tool in tools}
        begin = after_reasoning(text)
        if self._fenced:
            blocks = [(found.start(), found.group(1)) for found in _BLOCK.finditer(text, begin)]
        else:
            start = _list_start(text, begin, names)
            end = max(text.rfind("]"), start) + 1  # words after the list are not part of it
            blocks = [] if start < 0 else [(start, text[start:end] if text[start:end].endswith("]") else text[start:])]
        if not blocks:
            return ParsedText(content=text)
        calls: list[ToolCall] = []
        failures: list[ToolResult] = []
        for _, code in blocks:
            self._read(code, calls, failures)
        return ParsedText(content=text[: blocks[0][0]].strip(), calls=tuple(calls), failures=tuple(failures))

    def _read(self, code: str, calls: list[ToolCall], failures: list[ToolResult]) -> None:
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = f"the call is not valid Python: {getattr(error, 'msg', error)}"
            failures.append(unreadable(len(calls) + len(failures), "", why))
            return
        for statement in tree.body:
            value = statement.value if isinstance(statement, ast.Expr) else statement
            for node in value.elts if isinstance(value, ast.List) else [value]:
                index = len(calls) + len(failures)
                try:
                    name, arguments = _call(node)
                except _Unreadable as error:
                    kind = ToolFailure.BAD_ARGUMENTS if error.name else ToolFailure.UNPARSEABLE
                    failures.append(unreadable(index, error.name, error.why, kind))
                else:
                    calls.append(ToolCall(id=call_id(index), name=name, arguments=arguments))


def _call(node: ast.AST) -> tuple[str, dict[str, object]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and node.args:
        node = node.args[0]  # Gemma likes to print what it calls
    if not isinstance(node, ast.Call):
        raise _Unreadable("", "only calls with named arguments may stand there")
    name = ast.unparse(node.func)
    if node.args:
        raise _Unreadable(name, "arguments must be named")
    arguments: dict[str, object] = {}
    for given in node.keywords:
        if given.arg is None:
            raise _Unreadable(name, "arguments must be named one by one")
        try:
            arguments[given.arg] = plain_value(given.value)
        except UNREADABLE as error:
            raise _Unreadable(name, f"argument {given.arg} is not a plain value") from error
    return name, arguments


def _call_rules(number: int, tool: ToolSpec) -> list[str]:
    """Rules of one tool's call: arguments in the order of its schema, those not required may be left out. Values are
    JSON, whose names for true, false and null ``plain_value`` reads, too.

    Raises:
        ConfigError: Python cannot write the tool's name, or that of an argument.
    """
    found = tool.parameters.get("properties")
    properties = found if isinstance(found, dict) else {}
    needed = tool.parameters.get("required")
    for name in (*tool.name.split("."), *properties):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ConfigError(f"tool {tool.name!r}: {name!r} is no name in Python, so its call cannot be forced",
                              hint="rename it, or set model.tool_format to hermes, llama or json")  # fmt: skip
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    # first0: no argument stands yet, next0: some do; each says what may come from the argument of its number on.
    rules = [f'call{number}: {json.dumps(f"{tool.name}(")} first{number}_0 ")"']
    for place, (name, schema) in enumerate(properties.items()):
        value, after = f"value{number}_{place}", f"next{number}_{place + 1}"
        is_needed = isinstance(needed, list) and name in needed
        for kind, written in (("first", f"{name}="), ("next", f", {name}=")):
            without = "" if is_needed else f" | {kind}{number}_{place + 1}"
            rules.append(f"{kind}{number}_{place}: {json.dumps(written)} {value} {after}{without}")
        body = {**shared, **schema} if isinstance(schema, dict) else shared
        rules.append(f"{value}: %json {json.dumps({**body, 'x-guidance': PLAIN_JSON})}")
    return [*rules, f'first{number}_{len(properties)}: ""', f'next{number}_{len(properties)}: ""']


def _arguments(call: ToolCall) -> str:
    if call.unread is not None:
        return call.unread
    return ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())


def _list_start(text: str, begin: int, names: set[str]) -> int:
    """Where the list of calls begins: a bracket with a tool's name after it; -1: nowhere."""
    for found in re.finditer(r"\[\s*([A-Za-z_][\w.]*)\s*\(", text[begin:]):
        if found.group(1) in names:
            return begin + found.start()
    return -1


def _signature(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    needed = required if isinstance(required, list) else []
    parts = []
    for name, schema in (properties if isinstance(properties, dict) else {}).items():
        kind = schema.get("type", "any") if isinstance(schema, dict) else "any"
        parts.append(f"{name}: {kind}" + ("" if name in needed else " = None"))
    return f"{tool.name}({', '.join(parts)})  # {tool.description}"


FORMAT = Pythonic("pythonic", fenced=False)
GEMMA = Pythonic("gemma", fenced=True)
