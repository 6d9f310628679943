"""Calls as Python, in a list and in a block; nothing is run."""

from __future__ import annotations

import pytest

from tandem.core.types import ToolCall, ToolFailure, ToolSpec
from tandem.text.parsers.pythonic import FORMAT, GEMMA

TOOLS = [
    ToolSpec(name="edit", description="Edit.", parameters={
        "type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}, "required": ["path"],
    }),
    ToolSpec(name="ls", description="List.", parameters={"type": "object", "properties": {}}),
]  # fmt: skip
BOTH = pytest.mark.parametrize("format", [FORMAT, GEMMA], ids=lambda each: each.name)


def wrapped(format, *calls):
    return "```tool_code\n" + "\n".join(calls) + "\n```" if format is GEMMA else f"[{', '.join(calls)}]"


@BOTH
def test_calls_after_words(format):
    found = format.parse("So: " + wrapped(format, 'edit(path="a", line=-3)', "ls()"), TOOLS)
    assert found.content == "So:" and not found.failures
    assert [(call.id, call.name, call.arguments) for call in found.calls] == [
        ("call_0", "edit", {"path": "a", "line": -3}), ("call_1", "ls", {}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "see [this](http://x)", "[other(a=1)]", "x[edit]", "```python\nls()\n```"]
)
@BOTH
def test_other_text_is_words(format, text):
    found = format.parse(text, TOOLS)
    assert (found.content, found.calls, found.failures) == (text, (), ())


@BOTH
@pytest.mark.parametrize(
    ("code", "failure", "name"),
    [
        ("edit('a')", ToolFailure.BAD_ARGUMENTS, "edit"),
        ("edit(**{'a': 1})", ToolFailure.BAD_ARGUMENTS, "edit"),
        ("edit(path=open('x'))", ToolFailure.BAD_ARGUMENTS, "edit"),
        ("edit(path=b'x')", ToolFailure.BAD_ARGUMENTS, "edit"),
        ("edit(path={1, 2})", ToolFailure.BAD_ARGUMENTS, "edit"),
        ("edit(path='\\ud800')", ToolFailure.BAD_ARGUMENTS, "edit"),
        (f"edit(line={10**30})", ToolFailure.BAD_ARGUMENTS, "edit"),
        ("edit(line=1e999)", ToolFailure.BAD_ARGUMENTS, "edit"),
    ],
)
def test_a_bad_call_is_a_failure_between_good_ones(format, code, failure, name):
    found = format.parse(wrapped(format, "ls()", code, "ls()"), TOOLS)
    assert [call.id for call in found.calls] == ["call_0", "call_2"]
    assert [(each.call_id, each.failure, each.name) for each in found.failures] == [("call_1", failure, name)]


@BOTH
@pytest.mark.parametrize("code", ["edit(path='a", "edit(", "edit(path='a') now"])
def test_an_unfinished_or_broken_call_is_a_failure(format, code):
    text = wrapped(format, "ls()", code).removesuffix("]").removesuffix("\n```")
    found = format.parse(text, TOOLS)
    assert not found.calls and [each.failure for each in found.failures] == [ToolFailure.UNPARSEABLE]


@BOTH
def test_what_is_written_is_read_back(format):
    calls = (
        ToolCall(id="call_0", name="edit", arguments={"path": "``` ]'\"é\n", "deep": {"a": [1, None, 2.5, True]}}),
        ToolCall(id="call_1", name="ls", arguments={}),
    )
    found = format.parse(format.write("Now.", calls, TOOLS), TOOLS)
    assert (found.content, found.calls, found.failures) == ("Now.", calls, ())


def test_the_tools_are_explained_as_signatures():
    assert "edit(path: string, line: integer = None)  # Edit." in FORMAT.explain(TOOLS)
    assert FORMAT.explain([]) == ""


def test_gemma_may_print_what_it_calls():
    assert GEMMA.parse("```tool_code\nprint(ls())\n```", TOOLS).calls[0].name == "ls"


def test_words_after_the_list_do_not_spoil_it():
    assert [call.name for call in FORMAT.parse("[ls()] I hope [that] helps", TOOLS).calls] == []
    assert [call.name for call in FORMAT.parse("[ls()] I hope so", TOOLS).calls] == ["ls"]
