"""Bare JSON calls: good, bad, unfinished, and objects that are no calls."""

from __future__ import annotations

import pytest

from tandem.core.types import ToolCall, ToolFailure, ToolSpec
from tandem.text.parsers.llama import FORMAT, JSON, TAG

TOOLS = [ToolSpec(name="edit", description="Edit.", parameters={"type": "object", "properties": {}})]
GOOD = '{"name": "edit", "parameters": {"path": "a", "line": 3}}'


@pytest.mark.parametrize("text", [GOOD, f"{TAG}{GOOD}", GOOD.replace("parameters", "arguments"), f"\n{GOOD}\n"])
def test_a_call_is_the_answer(text):
    found = FORMAT.parse(text, TOOLS)
    assert found.content == "" and not found.failures
    assert found.calls == (ToolCall(id="call_0", name="edit", arguments={"path": "a", "line": 3}),)


def test_words_before_it_and_several_calls():
    found = FORMAT.parse(f"So. {GOOD}; {GOOD}\n{GOOD}", TOOLS)
    assert found.content == "So." and [call.id for call in found.calls] == ["call_0", "call_1", "call_2"]


@pytest.mark.parametrize(
    "text", ["{}", '{"name": "other", "parameters": {}}', '{"a": {"b": 1}} and {', "{x}", "no {", ""]
)
def test_other_objects_are_words(text):
    found = FORMAT.parse(text, TOOLS)
    assert (found.content, found.calls, found.failures) == (text, (), ())


@pytest.mark.parametrize(
    ("text", "failure", "name"),
    [
        ('{"name": "edit", "parameters": "x"}', ToolFailure.BAD_ARGUMENTS, "edit"),
        ('{"name": "edit", "param', ToolFailure.UNPARSEABLE, ""),
        ('{"name": "edit", "parameters": {"a": "\\ud800"}}', ToolFailure.UNPARSEABLE, ""),
        (f'{{"name": "edit", "parameters": {{"a": {10**30}}}}}', ToolFailure.UNPARSEABLE, ""),
    ],
)
def test_a_bad_call_is_a_failure_and_the_next_one_counts_on(text, failure, name):
    found = FORMAT.parse(f"{GOOD}\n{text}", TOOLS)
    assert [call.id for call in found.calls] == ["call_0"]
    assert [(each.call_id, each.failure, each.name) for each in found.failures] == [("call_1", failure, name)]


def test_what_is_written_is_read_back():
    calls = (
        ToolCall(id="call_0", name="edit", arguments={"text": '};{ "é\n', "deep": {"a": [1, None, 2.5]}}),
        ToolCall(id="call_1", name="edit", arguments={}),
    )
    found = FORMAT.parse(FORMAT.write("Now.", calls, TOOLS), TOOLS)
    assert (found.content, found.calls, found.failures) == ("Now.", calls, ())


def test_calls_in_thoughts_are_thoughts():
    assert FORMAT.parse(f"<think>{GOOD}</think>{GOOD}", TOOLS).calls[0].id == "call_0"
    assert FORMAT.parse(f"<think>{GOOD}", TOOLS).calls == ()


def test_plain_json_writes_arguments_and_reads_both():
    calls = (ToolCall(id="call_0", name="edit", arguments={"line": 3}),)
    written = JSON.write("", calls, TOOLS)
    assert '"arguments": ' in written and JSON.parse(written, TOOLS).calls == calls == JSON.parse(
        FORMAT.write("", calls, TOOLS), TOOLS
    ).calls
    assert '"arguments": <object' in JSON.explain(TOOLS) and not JSON.is_native("tools")


def test_plain_json_reads_a_list_of_calls():
    call = GOOD.replace("parameters", "arguments")
    for text in (f"[{call}, {call}]", f"So. [\n  {call},\n  {call}\n]\n"):
        found = JSON.parse(text, TOOLS)
        assert found.content == text[: text.find("[")].strip() and not found.failures
        assert [each.id for each in found.calls] == ["call_0", "call_1"]
    assert JSON.parse("[1, 2]", TOOLS).content == "[1, 2]"
    assert JSON.parse(f"[[{call}]]", TOOLS).content == "["
