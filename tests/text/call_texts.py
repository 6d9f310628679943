"""What the tests of the followers share: following a text in pieces."""

from __future__ import annotations

from hypothesis import strategies as st

from tandem.core.types import ToolCall, ToolSpec
from tandem.text.told_calls import call_as_told

TOOLS = [
    ToolSpec(name=name, description="", parameters={"type": "object", "properties": {}})
    for name in ("edit", "look_up", "a.b-c")
]
LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
MARKUP = ["</tool_call>", '"', "\\", "]", "}", "{", "```", "\n```\n", "'", "'''", '"""', ")", ", b=2", "<tool_call>"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(MARKUP)
VALUES = st.recursive(
    LEAVES | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["path", "line", "text", "a_1"])
CUTS = st.lists(st.integers(0, 400), max_size=8)


def calls_of(names, keys):
    """Up to three calls of tools."""
    drawn = st.tuples(st.sampled_from(names), st.dictionaries(keys, VALUES, max_size=3))
    return st.lists(drawn, min_size=1, max_size=3).map(
        lambda pairs: tuple(
            ToolCall(id=f"call_{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(pairs)
        )
    )


def follow(form, text, cuts=(), tools=TOOLS):
    """(name, arguments, is whole) of each call; the pieces are checked on the way."""
    stream = form.follow(tools)
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [piece for a, b in zip(places, places[1:], strict=False) for piece in stream.push(text[a:b])]
    pieces += stream.finish()
    told: list[list[str]] = []
    for piece in pieces:
        if piece.name:
            assert piece.index == len(told) and not piece.arguments
            told.append([piece.name, ""])
        else:
            assert piece.index == len(told) - 1 and piece.arguments
            told[-1][1] += piece.arguments
    assert [tuple(each) for each in told] == [(call.name, call.arguments) for call in stream.calls]
    return [(call.name, call.arguments, call.is_whole) for call in stream.calls]


def check_format(form, content, calls, cuts):
    """What the format writes is followed, in any pieces, as it is read. Returns the text and what was told."""
    text = form.write(content, calls, TOOLS)
    found = form.parse(text, TOOLS)
    assert found.calls == calls and not found.failures
    whole = follow(form, text)
    assert whole == follow(form, text, cuts) == follow(form, text, range(len(text)))
    assert all(is_whole for *_, is_whole in whole)
    told = [call_as_told(f"call_{index}", name, arguments) for index, (name, arguments, _) in enumerate(whole)]
    assert tuple(told) == calls
    return text, whole


def check_beginnings(form, text, whole):
    """Every beginning of the text is told as a beginning of the same."""
    for end in range(len(text)):
        some = follow(form, text[:end])
        assert some == follow(form, text[:end], range(end)) and len(some) <= len(whole)
        for (name, arguments, _), (other, all_of_it, _) in zip(some, whole, strict=False):
            assert name == other and all_of_it.startswith(arguments)
