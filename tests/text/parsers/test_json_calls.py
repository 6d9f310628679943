"""JSON calls while they are written."""

from __future__ import annotations

import json

import pytest
from call_texts import CUTS, NAMES, TEXTS, calls_of, check_beginnings, check_format, follow
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.text.parsers import hermes, llama

FORMATS = {"hermes": hermes.FORMAT, "llama": llama.FORMAT, "json": llama.JSON}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["", "So."]), calls_of(["edit", "a.b-c"], NAMES | TEXTS), CUTS)
def test_calls_are_told_as_they_are_written_whatever_the_pieces(name, content, calls, cuts):
    text, whole = check_format(FORMATS[name], content, calls, cuts)
    if len(text) < 150:
        check_beginnings(FORMATS[name], text, whole)


def test_arguments_come_as_the_model_wrote_them():
    text = '<tool_call>\n{"name":"edit" , "arguments" :{"a" : 1e3,\n"b":"}"}\n}\n</tool_call>'
    assert follow(hermes.FORMAT, text) == [("edit", '{"a" : 1e3,\n"b":"}"}', True)]
    text = '<|python_tag|>{"name": "edit", "arguments": {"a": "\\""}}'
    assert follow(llama.FORMAT, text) == [("edit", '{"a": "\\""}', True)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('<tool_call>{"name": "edit", "arguments": {"a": [1', [("edit", '{"a": [1', False)]),
        ('<tool_call>{"name": "edit", "arguments": {"a": 1}', [("edit", '{"a": 1}', False)]),
        ('<tool_call>{"name": "edit", "arguments": {}}</tool_call', [("edit", "{}", False)]),
        ('<tool_call>{"name": "edit", "arguments": {\'a\': x}}</tool_call>', [("edit", "{'a': x}", True)]),
        ('<tool_call>{"name": "ed', []),
        ('<tool_call>{"arguments": {}, "name": "edit"}</tool_call>', []),
        ('<tool_call>{"name": "edit", "arguments": "x"}</tool_call>', []),
        ('<tool_call>{"name": "edit", "arguments": {}, "id": 1}</tool_call>', [("edit", "{}", False)]),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
        ("<tool_cal", []),
    ],
)
def test_a_cut_call_is_told_as_far_as_it_goes_and_one_in_another_order_is_not_followed(text, told):
    assert follow(hermes.FORMAT, text) == told == follow(hermes.FORMAT, text, range(len(text)))


@pytest.mark.parametrize(
    "text", ['{"a": {"name": "edit", "parameters": {}}}', '{"name": "other", "parameters": {}}', "{x}"]
)
def test_an_object_of_the_answers_own_is_no_call(text):
    assert follow(llama.FORMAT, text) == [] == follow(llama.FORMAT, text, range(len(text)))


def test_a_list_of_calls_in_plain_json():
    call = json.dumps({"name": "edit", "arguments": {"a": "]"}})
    assert follow(llama.JSON, f"[{call}, {call}]") == [("edit", '{"a": "]"}', True)] * 2
