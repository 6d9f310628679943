"""Python calls while they are written."""

from __future__ import annotations

import json

import pytest
from call_texts import CUTS, NAMES, calls_of, check_beginnings, check_format, follow
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.text.parsers.pythonic import FORMAT, GEMMA


@pytest.mark.parametrize("form", [FORMAT, GEMMA], ids=["pythonic", "gemma"])
@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["", "So."]), calls_of(["edit", "look_up"], NAMES), CUTS)
def test_calls_are_told_argument_by_argument_whatever_the_pieces(form, content, calls, cuts):
    text, whole = check_format(form, content, calls, cuts)
    assert [told[1] for told in whole] == [json.dumps(call.arguments, ensure_ascii=False) for call in calls]
    if len(text) < 120:
        check_beginnings(form, text, whole)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[edit(a=1, b='x", [("edit", '{"a": 1', False)]),
        ("[edit(a=1)", [("edit", '{"a": 1}', False)]),
        ("see [1] and [edit(a=(1,\n 2), b=r'\\n', c='''it's''', d='a' 'b',), look_up()]",
         [("edit", '{"a": [1, 2], "b": "\\\\n", "c": "it\'s", "d": "ab"}', True), ("look_up", "{}", True)]),
        ("[edit(x)]", [("edit", "", False)]),
        ("[edit(a=f())]", [("edit", "", False)]),
        ("[edit(a=1, a=2)]", [("edit", '{"a": 1', False)]),
        ("[edit(a=1 # why\n)]", [("edit", "", False)]),
        ("[edit(a='\\ud800')]", [("edit", "", False)]),
        ("[other(a=1)] [ edit ( a=1 ) ]", [("edit", '{"a": 1}', True)]),
        ("[edit(a=1)] and [edit(a=2)]", [("edit", '{"a": 1}', True)]),
    ],
)  # fmt: skip
def test_lists(text, told):
    assert follow(FORMAT, text) == told == follow(FORMAT, text, range(len(text)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```tool_code\nprint(edit(a=1))\nlook_up()\n```", [("edit", '{"a": 1}', True), ("look_up", "{}", True)]),
        ("Hm ```tool_codes\n``` ```tool_code \n\nedit(a=1)\n\n```\n```tool_code\nedit()\n```",
         [("edit", '{"a": 1}', True), ("edit", "{}", True)]),
        ("```tool_code\nedit(a=1)\n", [("edit", '{"a": 1}', False)]),
        ("```tool_code\nprint(1)\n```", []),
        ("```tool_code\nx = 1\n```", []),
        ("```tool_co", []),
    ],
)  # fmt: skip
def test_blocks(text, told):
    assert follow(GEMMA, text) == told == follow(GEMMA, text, range(len(text)))
