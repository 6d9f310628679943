"""The fence format: good, bad and unfinished calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.core.types import ToolCall, ToolFailure, ToolSpec
from tandem.text.parsers.fence import FORMAT


def tool(name: str, **properties: str) -> ToolSpec:
    schema = {each: {"type": kind} for each, kind in properties.items()}
    return ToolSpec(
        name=name,
        description=f"Use {name}.",
        parameters={"type": "object", "properties": schema, "required": list(properties)},
    )


TOOLS = [tool("python", code="string"), tool("shell", command="string")]


def calls_in(text: str) -> list[tuple[str, object]]:
    return [(call.name, *call.arguments.values()) for call in FORMAT.parse(text, TOOLS).calls]


def test_calls_in_words():
    found = FORMAT.parse("First.\n```python\nprint(1)\n```\nThen:\n```shell\nls -l\n```\nDone.", TOOLS)
    assert [(call.id, call.name, call.arguments) for call in found.calls] == [
        ("call_0", "python", {"code": "print(1)"}),
        ("call_1", "shell", {"command": "ls -l"}),
    ]
    assert found.content == "First.\n\nThen:\n\nDone."
    assert found.failures == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n\nb\n```", [("python", "a\n\nb")]),
        ("```python\n```", [("python", "")]),
        ("```python  \n  x\n```  ", [("python", "  x")]),
        ("```python\nprint('```')\n```", [("python", "print('```')")]),
        ("````python\n```\n````", [("python", "```")]),
        ("```text\n```python\nx\n```", []),  # the body of a block that is no call
        ("say ```python\nx\n```", []),  # a call begins its line
        ("``python\nx\n``", []),
        ("<think>```python\nx\n```</think>no", []),
    ],
)
def test_what_is_a_call(text: str, expected: list[tuple[str, str]]):
    assert calls_in(text) == expected


def test_blocks_of_other_names_stay_words():
    text = "Like so:\n```json\n{}\n```\nend"
    found = FORMAT.parse(text, TOOLS)
    assert (found.content, found.calls, found.failures) == (text, (), ())


@pytest.mark.parametrize("text", ["```python", "```python\nprint(1)", "```python\nprint(1)\n``", "````python\nx\n```"])
def test_an_unfinished_call_is_a_failure(text: str):
    found = FORMAT.parse("Well.\n" + text, TOOLS)
    assert found.calls == ()
    assert [(each.call_id, each.name, each.failure) for each in found.failures] == [
        ("call_0", "python", ToolFailure.UNPARSEABLE)
    ]
    assert found.content == "Well."


@given(st.lists(st.text(alphabet="ab`\n ", max_size=20), max_size=3), st.sampled_from(["", "Now."]))
def test_what_is_written_is_read_back(bodies: list[str], content: str):
    calls = [
        ToolCall(id=f"call_{index}", name="python", arguments={"code": body}) for index, body in enumerate(bodies)
    ]
    found = FORMAT.parse(FORMAT.write(content, calls, TOOLS), TOOLS)
    assert (found.content, list(found.calls), found.failures) == (content, calls, ())


UNFIT = [tool("edit", path="string", text="string"), tool("wait", seconds="number"), tool("none")]


@pytest.mark.parametrize("wrong", UNFIT)
def test_tools_that_do_not_fit_are_named(wrong: ToolSpec):
    with pytest.raises(ConfigError, match=f"tool '{wrong.name}' does not fit"):
        FORMAT.check([*TOOLS, wrong])


def test_the_explanation_is_short():
    text = FORMAT.explain(TOOLS)
    assert text.count("```") == 4 and len(text) < 200
    assert FORMAT.explain([]) == ""
