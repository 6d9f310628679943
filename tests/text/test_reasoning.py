"""Thoughts and answers: split at the same place whatever pieces the text comes in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.text.reasoning import Reasoning, ReasoningSplit, find_reasoning

THINK = Reasoning(opening="<think>", closing="</think>")
OPENED = Reasoning(opening="<think>", closing="</think>", is_opened=True)


def split(reasoning: Reasoning | None, *pieces: str) -> tuple[str, str]:
    reader = ReasoningSplit(reasoning)
    made = [*(reader.push(piece) for piece in pieces), reader.finish()]
    return "".join(thought for thought, _ in made), "".join(said for _, said in made)


@pytest.mark.parametrize(
    ("tags", "text", "expected"),
    [
        (THINK, "<think>\nSix times\n\nseven.\n</think>\n\nIt is 42. ", ("Six times\n\nseven.", "It is 42. ")),
        (THINK, "<think>\n\n</think>\n\n42", ("", "42")),
        (THINK, "\n<think>cut off </thi", ("cut off </thi", "")),
        (THINK, " 42 <think>late</think>", ("", " 42 <think>late</think>")),
        (THINK, "<thin", ("", "<thin")),
        (THINK, "", ("", "")),
        (THINK, "<think>a</think>b</think>c", ("a", "b</think>c")),
        (OPENED, "Six times seven.\n</think>\n42", ("Six times seven.", "42")),
        (OPENED, "<think>again</think>42", ("again", "42")),
        (OPENED, "never closed ", ("never closed", "")),
        (None, "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_every_cut_gives_the_same(tags: Reasoning | None, text: str, expected: tuple[str, str]) -> None:
    for cut in range(len(text) + 1):
        assert split(tags, text[:cut], text[cut:]) == expected
    assert split(tags, *text) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "</thi", "<", "a ", "\n", " b", "k>"]), max_size=10),
    st.sampled_from([THINK, OPENED, None]),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_any_cutting_gives_the_same(parts: list[str], tags: Reasoning | None, cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert split(tags, *pieces) == split(tags, text)


def test_the_tags_are_the_templates_or_the_options() -> None:
    def found(name: str, template: str, opening: str = "<|im_start|>assistant\n") -> Reasoning | None:
        return find_reasoning(name, chat_template=template, turn_opening=opening)

    qwen = "{{ message.content.split('</think>')[-1] }}"
    assert found("auto", qwen) == THINK
    assert found("auto", qwen, "<|im_start|>assistant\n<think>\n") == OPENED
    assert found("auto", "no thoughts") is found("none", qwen) is None
    assert found("[T] [/T]", "no thoughts") == Reasoning(opening="[T]", closing="[/T]")
    with pytest.raises(ConfigError, match="model.reasoning"):
        found("deepthink", qwen)
