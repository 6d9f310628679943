"""Guides: an answer that follows one fits its grammar, and ends only where it may."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from serve_pieces import END, renderer

from tandem.core.errors import ConfigError
from tandem.core.types import ToolCall, ToolSpec
from tandem.text.guide import Guides
from tandem.text.tool_format import find_format

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(renderer().tokenizer, renderer().stop_token_ids)


def walk(guide, seed: int, *, limit: int = 400) -> str:
    """A random answer among those that the guide allows; short tokens first, so that it comes to an end."""
    draw, made = random.Random(seed), []
    end = renderer().tokenizer.special_tokens[END]
    for _ in range(limit):
        allowed = np.flatnonzero(guide.allowed())
        assert len(allowed)
        token = end if end in allowed and draw.random() < 0.5 else int(draw.choice(allowed))
        guide.advance(token)
        if token == end:
            return renderer().tokenizer.decode(made)
        made.append(token)
    raise AssertionError(f"no end after {limit} tokens")


@pytest.mark.parametrize("seed", range(8))
def test_every_allowed_answer_fits_the_schema(guides, seed):
    found = json.loads(walk(guides.json_schema(SCHEMA), seed))
    assert set(found) == {"name", "ages"} and len(found["name"]) <= 5
    assert all(isinstance(age, int) for age in found["ages"]) and len(found["ages"]) <= 3


@pytest.mark.parametrize("seed", range(8))
def test_every_allowed_answer_matches_the_pattern(guides, seed):
    pattern = r"(yes|no), [0-9]{1,3}"
    assert re.fullmatch(pattern, walk(guides.regex(pattern), seed))


def test_only_the_end_follows_a_whole_answer(guides):
    guide = guides.regex("AB")
    words = {renderer().tokenizer.decode([token]) for token in np.flatnonzero(guide.allowed())}
    assert "AB" in words <= {"A", "AB"}
    guide.advance(renderer().tokenizer.token_id("AB"))
    assert set(np.flatnonzero(guide.allowed())) == set(renderer().stop_token_ids)


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1"])
def test_a_pattern_that_cannot_be_followed_is_refused(guides, pattern):
    with pytest.raises(ConfigError, match="regular expression cannot be followed"):
        guides.regex(pattern)


@pytest.mark.parametrize(
    "schema", [{"type": "thing"}, {"$ref": "#/nowhere"}, {"type": "array", "minItems": 3, "maxItems": 1}]
)
def test_a_schema_that_cannot_be_followed_is_refused(guides, schema):
    with pytest.raises(ConfigError, match="JSON schema cannot be followed"):
        guides.json_schema(schema)


TOOLS = (
    ToolSpec(name="look", description="", parameters={
        "type": "object", "properties": {"where": {"enum": ["here", "there"]}}, "required": ["where"],
        "additionalProperties": False}),
    ToolSpec(name="add", description="", parameters={
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
        "additionalProperties": False}),
)  # fmt: skip
PLAIN = ToolSpec(name="shell", description="", parameters={
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]})  # fmt: skip


@pytest.mark.parametrize("name", ["gemma", "hermes", "json", "llama", "pythonic"])
@pytest.mark.parametrize("several", [False, True])
def test_an_answer_that_must_call_is_calls_and_nothing_else(guides, name, several):
    found, _ = find_format(name, chat_template=None)
    counts = set()
    for seed in range(12):
        parsed = found.parse(walk(guides.lark(found.grammar(TOOLS, several=several)), seed), TOOLS)
        assert parsed.calls and not parsed.failures and not parsed.content
        assert all(call.arguments.get("where") in ("here", "there") or call.arguments.get("a") in range(10)
                   for call in parsed.calls)  # fmt: skip
        counts.add(len(parsed.calls))
    assert counts == {1} if not several else max(counts) > 1


@pytest.mark.parametrize("name", ["fence", "hermes", "llama"])
def test_what_a_format_writes_is_what_its_grammar_allows(guides, name):
    found, _ = find_format(name, chat_template=None)
    written = found.write("", [ToolCall(id="0", name="shell", arguments={"command": "ls -l\necho"})], [PLAIN])
    guide = guides.lark(found.grammar([PLAIN], several=False))
    for token in renderer().tokenizer.encode(written):
        assert guide.allowed()[token]
        guide.advance(token)
    assert guide.allowed()[renderer().tokenizer.special_tokens[END]]
    assert not guides.lark(found.grammar([PLAIN], several=False)).allowed()[renderer().tokenizer.encode("x")[0]]


ANYTHING = ToolSpec(name="my.set", description="", parameters={
    "type": "object", "$defs": {"side": {"enum": ["left", "right"]}}, "required": ["on"],
    "properties": {
        "label": {"type": "string", "maxLength": 4}, "on": {"type": "boolean"}, "side": {"$ref": "#/$defs/side"},
        "more": {"type": "array", "items": {"enum": [None, 1.5, -7]}, "maxItems": 2},
    }})  # fmt: skip


@pytest.mark.parametrize("name", ["gemma", "pythonic"])
def test_python_calls_that_are_forced_have_whatever_the_schema_allows(guides, name):
    found, _ = find_format(name, chat_template=None)
    grammar, seen, values = found.grammar([ANYTHING], several=False), set(), []
    for seed in range(40):
        text = walk(guides.lark(grammar), seed)
        (call,) = found.parse(text, [ANYTHING]).calls
        follower = found.follow([ANYTHING])
        pieces = [*follower.push(text), *follower.finish()]
        assert json.loads("".join(piece.arguments for piece in pieces)) == call.arguments
        arguments = call.arguments
        assert isinstance(arguments["on"], bool) and len(str(arguments.get("label", ""))) <= 4
        assert arguments.get("side", "left") in ("left", "right")
        values += arguments.get("more", [])
        seen.add(frozenset(arguments))
    assert frozenset({"on"}) in seen and any(len(each) > 2 for each in seen)
    assert None in values and any(isinstance(value, int | float) for value in values)


@pytest.mark.parametrize(("tool", "argument"), [("look-up", "a"), ("look", "class"), ("look", "file-name")])
def test_a_call_that_python_cannot_write_cannot_be_forced(tool, argument):
    spec = ToolSpec(name=tool, description="", parameters={"properties": {argument: {"type": "string"}}})
    with pytest.raises(ConfigError, match="cannot be forced"):
        find_format("pythonic", chat_template=None)[0].grammar([spec], several=False)
