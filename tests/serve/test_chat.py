"""Requests: what is taken, and that every mistake is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.types import Role
from tandem.serve.chat import read_request
from tandem.serve.requests import BadRequest

USER = {"role": "user", "content": "hi"}


def request(**fields):
    return read_request(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def test_defaults():
    asked, messages = request().asked, request().messages
    assert asked.max_tokens is None and asked.num_choices == 1 and not asked.stream
    assert (asked.params.temperature, asked.params.top_p, asked.params.top_k) == (1.0, 1.0, 0)
    assert messages[0].role is Role.USER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "nope"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "tools": [{"function": {"name": "a"}}]}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "look", "tools": [{"function": {"name": "look"}}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [{"function": {"name": "a"}}]},
         "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a"}}, {"function": {"name": "a"}}]}, "tools[1].function.name"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_mistake_is_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        request(**fields)
    assert caught.value.param == param and param in caught.value.message and caught.value.status == 400


def test_a_misspelt_field_names_the_nearest():
    with pytest.raises(BadRequest, match="did you mean 'temperature'"):
        request(temprature=1)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": "m"}', b"[" * 100_000, b'{"model": NaN}'])
def test_what_is_no_request_is_refused(data):
    with pytest.raises(BadRequest):
        read_request(data)


def test_a_tool_message_gets_the_name_of_its_call():
    call = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
    asked = request(
        messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                  {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]}]
    )  # fmt: skip
    assert asked.messages[2].name == "python" and asked.messages[2].content == "1"
    assert asked.messages[1].tool_calls[0].arguments == {"code": "1"}


@pytest.mark.parametrize("arguments", ["{", "", "[1]", "1", '{"a": "\\ud800"}', '{"a": 1e', '{"a": ' + "9" * 40 + "}"])
def test_arguments_that_are_no_object_come_back_as_they_were_told(arguments):
    call = {"id": "c1", "function": {"name": "python", "arguments": arguments}}
    told = request(messages=[USER, {"role": "assistant", "tool_calls": [call]}, USER]).messages[1].tool_calls[0]
    assert (told.arguments, told.unread) == ({}, arguments)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["model", "messages", "tools", "tool_choice", "stream", "stream_options", "temperature", "top_p", "top_k",
     "max_tokens", "n", "seed", "stop", "logprobs", "top_logprobs", "logit_bias", "user", "metadata", "other"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=5), st.booleans())
def test_whatever_comes_is_a_request_or_a_named_mistake(fields, whole):
    body = ({"model": "m", "messages": [USER]} if whole else {}) | fields
    try:
        read_request(json.dumps(body).encode())
    except BadRequest as error:
        assert error.message and 400 <= error.status < 500
