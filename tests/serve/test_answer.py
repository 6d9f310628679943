"""Stop strings across tokens, the true finish reason (cases 11 and 12), and text that may be a call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_pieces import END, renderer, say

from tandem.core.types import FinishReason, ToolSpec, ids
from tandem.serve.answer import AnswerReader, StopStrings
from tandem.text.reasoning import Reasoning

PYTHON = ToolSpec(
    name="python",
    description="Runs code.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)


def read(token_ids, *, limit=10**6, tools=(), stops=(), size=1, tool_format="fence"):
    """What a client of both modes gets: the streamed pieces joined, and the whole answer."""
    reader = AnswerReader(renderer(tool_format), tools, stops)
    made = list(token_ids)[:limit]
    ended = bool(made) and made[-1] in renderer(tool_format).stop_token_ids
    streamed = ""
    for start in range(0, len(made), size):
        streamed += reader.push(made[start : start + size])
    last, answer = reader.finish(ids(made), FinishReason.STOP if ended else FinishReason.LENGTH)
    return streamed + last, answer


def joined(pieces):
    """Name and arguments of each call; the name comes first and alone."""
    calls = {}
    for piece in pieces:
        if piece.name:
            assert piece.index == len(calls) and not piece.arguments
            calls[piece.index] = (piece.name, "")
        else:
            assert piece.index == len(calls) - 1 and piece.arguments
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return list(calls.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("stop", "content", "reason"),
    [("DE", "ABC", "stop"), ("FGH", "ABCDEFG", "length"), ("G", "ABCDEF", "stop"), ("AB", "", "stop")],
)
def test_a_stop_string_across_tokens_cuts_exactly_there(stop, content, reason, size):
    streamed, answer = read(say("ABCDEFG", end=False), stops=[stop], size=size)
    assert (streamed, answer.content, answer.finish_reason) == (content, content, reason)


def test_tokens_after_the_stop_string_are_not_counted():
    _, answer = read(say("ABCDEFG"), stops=["DE"])
    assert answer.num_tokens == 3  # AB CD EF: the third completes it


def test_of_two_stop_strings_the_first_complete_one_counts_for_every_cut():
    text = "xxDEFGyy"
    for cut in range(len(text)):
        stops = StopStrings(["DEFGyy", "EF"])
        assert stops.push(text[:cut]) + stops.push(text[cut:]) + stops.finish() == "xxD"


@settings(max_examples=200, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_strings_do_not_depend_on_the_cuts(text, stops, cuts):
    whole = StopStrings(stops)
    expected = whole.push(text) + whole.finish()
    pieces, places = StopStrings(stops), sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    joined = "".join(pieces.push(text[a:b]) for a, b in zip(places, places[1:], strict=False)) + pieces.finish()
    assert (joined, pieces.stopped) == (expected, whole.stopped)
    assert text.startswith(joined) and (whole.stopped or joined == text)


def test_the_end_token_as_last_allowed_token_is_a_stop():
    token_ids = say("plain text")
    assert read(token_ids, limit=len(token_ids))[1].finish_reason is FinishReason.STOP
    assert read(token_ids, limit=len(token_ids) - 1)[1].finish_reason is FinishReason.LENGTH
    assert read(token_ids)[1].content == "plain text"


@pytest.mark.parametrize("tool_format", ["fence", "hermes"])
def test_a_call_of_forty_tokens_under_every_limit(tool_format):
    form = {
        "fence": "```python\n{}\n```",
        "hermes": '<tool_call>{{"name":"python","arguments":{{"code":"{}"}}}}</tool_call>',
    }[tool_format]
    room = max(40, len(form.format("")) + 8) - len(form.format(""))
    token_ids = say(form.format("1" * room))  # every character is one token
    length = len(token_ids) - 1
    for limit in range(1, length + 6):
        streamed, answer = read(token_ids, limit=limit, tools=[PYTHON], tool_format=tool_format)
        assert streamed == answer.content
        if limit < length:
            assert answer.finish_reason is FinishReason.LENGTH
            if answer.calls:  # it has a name and the beginning of its arguments
                (cut,) = answer.calls
                assert cut.call.name == "python" and answer.content == "" and not cut.is_whole
                begun = json.dumps({"code": "1" * room}).replace(" ", "" if tool_format == "hermes" else " ")
                assert begun.startswith(cut.text.replace("\\n", "").rstrip("`")) and cut.text.count("1") <= limit
            else:
                assert answer.content == form.format("1" * room)[:limit], "cut text is not lost"
        else:
            assert answer.finish_reason is FinishReason.TOOL_CALLS
            assert [told.call.arguments for told in answer.calls] == [{"code": "1" * room}]
            assert answer.content == ""


def test_words_before_a_call_are_streamed_and_the_call_is_not():
    reader = AnswerReader(renderer(), [PYTHON], ())
    token_ids = say("I will see. \n```python\nprint(1)\n```")
    streamed = "".join(reader.push([token_id]) for token_id in token_ids)
    assert streamed == "I will see."
    last, answer = reader.finish(ids(token_ids), FinishReason.STOP)
    assert (last, answer.content, answer.finish_reason) == ("", "I will see.", FinishReason.TOOL_CALLS)


THINK = Reasoning(opening="<think>", closing="</think>")
OPENED = Reasoning(opening="<think>", closing="</think>", is_opened=True)
PIECES = {
    "fence": ["```python\n1+1\n```\n", "```python\n2", "``", "```text\nx\n```\n"],
    "hermes": ['<tool_call>{"name": "python", "arguments": {"code": "</tool_call>"}}</tool_call>', "<tool_call>{", "<"],
    "llama": ['{"name": "python", "parameters": {"code": "}"}}', '{"a": 1}', '{"name', "{", "; "],
    "json": ['{"name": "python", "arguments": {"code": "{"}}', '{"a": 1}', '{"name', "{", "\n", "[", "]",
             '[{"name": "python", "arguments": {"code": "["}}, {"name": "python", "arguments": {}}]'],
    "pythonic": ['[python(code="]")]', "[python(", "[1]", "["],
    "gemma": ['```tool_code\npython(code="``")\n```', "```tool_code\npy", "``"],
}
CLOSED = {form: pieces[0] for form, pieces in PIECES.items()}


@pytest.mark.parametrize("form", PIECES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_cutting_of_the_stream_gives_the_same_answer(form, data):
    """Of every format, thoughts before it or not: words, calls, thoughts and reason."""
    pieces = [*PIECES[form], "word ", "\n", "é", "<think>hm ", "</think>"]
    parts = data.draw(st.lists(st.sampled_from(pieces), max_size=7))
    token_ids = say("".join(parts), end=data.draw(st.booleans()))
    cuts = sorted({0, len(token_ids), *data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8))})
    tools = data.draw(st.sampled_from([[PYTHON], []]))
    tags = data.draw(st.sampled_from([THINK, OPENED, None]))

    def given_out(pieces):
        reader = AnswerReader(renderer(form), tools, data_stops, reasoning=tags)
        words, thoughts, calls = "", "", []
        for piece in pieces:
            words += reader.push(piece)
            thoughts += reader.take_reasoning()
            calls += reader.take_calls()
        last, answer = reader.finish(ids(token_ids), FinishReason.STOP)
        assert (words + last, thoughts + reader.take_reasoning()) == (answer.content, answer.reasoning)
        told = joined(calls + reader.take_calls())
        assert told == [(one.call.name, one.text) for one in answer.calls[: len(told)]]
        return answer

    data_stops = data.draw(st.sampled_from([[], ["d\n"]]))
    pieces = [token_ids[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    assert given_out(pieces) == given_out([token_ids]) == given_out([[each] for each in token_ids])


@pytest.mark.parametrize("form", CLOSED)
def test_thoughts_are_apart_from_words_and_calls_and_counted_to_the_token(form):
    thought = f"<think>\nI could {CLOSED[form]} DE\n</think>"
    token_ids = say(f"{thought}\n\nSo:\n{CLOSED[form]}")
    reader = AnswerReader(renderer(form), [PYTHON], ["DE"], reasoning=THINK)
    for token_id in token_ids:
        reader.push([token_id])
    _, answer = reader.finish(ids(token_ids), FinishReason.STOP)
    assert answer.reasoning == thought.removeprefix("<think>").removesuffix("</think>").strip()
    assert answer.content == "So:" and len(answer.calls) == 1
    assert answer.num_reasoning_tokens == len(say(thought, end=False))


PARTS = ["word ", "\n", "```python\n1+1\n```", "``", "```text\nx\n```\n", "é", "<think>", "</think>"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PARTS)), st.booleans(), st.integers(1, 5))
def test_streamed_equals_whole_whatever_is_said(parts, with_tools, size):
    token_ids = say("".join(parts))
    streamed, answer = read(token_ids, tools=[PYTHON] if with_tools else [], size=size)
    assert streamed == answer.content
    if not answer.calls and not with_tools:
        assert answer.content == "".join(parts)


def test_a_character_split_over_tokens_is_whole_in_every_piece():
    reader = AnswerReader(renderer(), (), ())
    pieces = [reader.push([token_id]) for token_id in say("né€🙂!")]
    assert "".join(pieces) == "né€🙂!" and not any("\ufffd" in piece for piece in pieces)


def test_where_one_call_is_wanted_the_answer_ends_with_it() -> None:
    text = "Look:\n```python\n1\n```\n```python\n2\n```"
    whole = ids(say(text))
    reader = AnswerReader(renderer(), [PYTHON], [], one_call=True)
    given = "".join(reader.push([token]) for token in whole)
    assert reader.stopped
    last, answer = reader.finish(whole, FinishReason.STOP)
    assert (given + last).strip() == answer.content == "Look:"
    assert [told.call.arguments for told in answer.calls] == [{"code": "1"}]
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert renderer().tokenizer.decode(whole[: answer.num_tokens]) == "Look:\n```python\n1\n```"


def test_an_end_token_in_the_middle_is_text_and_at_the_end_is_not():
    end = renderer().tokenizer.special_tokens[END]
    _, answer = read([*say("A", end=False), end, *say("B", end=False), end])
    assert answer.content == f"A{END}B" and answer.num_tokens == 4
