"""Fenced calls while they are written."""

from __future__ import annotations

import json

from call_texts import CUTS, follow
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.types import ToolSpec
from tandem.text.parsers.fence import FORMAT

SPEC = ToolSpec(name="python", description="", parameters={
    "type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]})  # fmt: skip
PARTS = st.sampled_from(["```python\n", "```text\n", "```\n", "```", "````\n", "````python\n", "`", "\n", " ", "a\n",
                         "é", '"', "```python", "x"])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS, max_size=9).map("".join), CUTS)
def test_blocks_are_told_as_they_are_read_whatever_the_pieces(text, cuts):
    told = follow(FORMAT, text, cuts, [SPEC])
    assert told == follow(FORMAT, text, (), [SPEC]) == follow(FORMAT, text, range(len(text)), [SPEC])
    read = FORMAT.parse(text, [SPEC]).calls
    assert [json.loads(arguments) for _, arguments, is_whole in told if is_whole] == [call.arguments for call in read]


def test_a_body_is_told_before_its_end_but_for_what_may_be_its_end():
    stream = FORMAT.follow([SPEC])
    pushes = ["```python\n", "a = 1", "\nb", "\n``", "` no\n", "```", "\n"]
    told = ["".join(piece.name or piece.arguments for piece in stream.push(text)) for text in pushes]
    assert told == ['python{"code": "', "a = 1", "\\nb", "", "\\n``` no", "", '"}']
