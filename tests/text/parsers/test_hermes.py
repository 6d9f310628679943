"""The hermes format: good, bad and unfinished calls."""

from __future__ import annotations

import pytest

from tandem.core.types import ToolCall, ToolFailure, ToolSpec
from tandem.text.parsers.hermes import FORMAT

TOOLS = [ToolSpec(name="edit", description="Edit.", parameters={"type": "object", "properties": {}})]
GOOD = '<tool_call>\n{"name": "edit", "arguments": {"path": "a", "line": 3}}\n</tool_call>'


def test_calls_in_words():
    found = FORMAT.parse(f"First. {GOOD} then {GOOD}", TOOLS)
    assert found.content == "First.  then"
    assert [(call.id, call.name, call.arguments) for call in found.calls] == [
        ("call_0", "edit", {"path": "a", "line": 3}),
        ("call_1", "edit", {"path": "a", "line": 3}),
    ]


@pytest.mark.parametrize(
    ("text", "failure", "name"),
    [
        ("<tool_call>{'name': 1}</tool_call>", ToolFailure.UNPARSEABLE, ""),
        ("<tool_call>[]</tool_call>", ToolFailure.UNPARSEABLE, ""),
        ('<tool_call>{"arguments": {}}</tool_call>', ToolFailure.UNPARSEABLE, ""),
        ('<tool_call>{"name": "edit", "arguments": "x"}</tool_call>', ToolFailure.BAD_ARGUMENTS, "edit"),
        (GOOD.removesuffix("</tool_call>"), ToolFailure.UNPARSEABLE, ""),
        ('<tool_call>{"name": "ed', ToolFailure.UNPARSEABLE, ""),
        ('<tool_call>{"name": "edit", "arguments": {"path": "\\ud800"}}</tool_call>', ToolFailure.UNPARSEABLE, ""),
        (f'<tool_call>{{"name": "edit", "arguments": {{"line": {10**30}}}}}</tool_call>', ToolFailure.UNPARSEABLE, ""),
        (f"<tool_call>{'[' * 100_000}</tool_call>", ToolFailure.UNPARSEABLE, ""),
    ],
)
def test_a_bad_call_is_a_failure_and_the_next_one_counts_on(text: str, failure: ToolFailure, name: str):
    found = FORMAT.parse(GOOD + text, TOOLS)
    assert [call.id for call in found.calls] == ["call_0"]
    assert [(each.call_id, each.failure, each.name) for each in found.failures] == [("call_1", failure, name)]


def test_calls_in_thoughts_are_thoughts():
    assert FORMAT.parse(f"<think>{GOOD}</think>{GOOD}", TOOLS).calls[0].id == "call_0"
    assert FORMAT.parse(f"<think>{GOOD}", TOOLS).calls == ()


def test_what_is_written_is_read_back():
    calls = [
        ToolCall(id="call_0", name="edit", arguments={"text": "</tool_call> \"é\n", "deep": {"a": [1, None, 2.5]}}),
        ToolCall(id="call_1", name="edit", arguments={}),
    ]
    found = FORMAT.parse(FORMAT.write("Now.", calls, TOOLS), TOOLS)
    assert (found.content, list(found.calls), found.failures) == ("Now.", calls, ())


def test_it_is_native_where_the_template_speaks_it():
    assert FORMAT.is_native("{% for tool in tools %}<tool_call>{% endfor %}")
    assert not FORMAT.is_native("{% for tool in tools %}<|python_tag|>{% endfor %}")
