"""Which format a model gets."""

from __future__ import annotations

import pytest
from conversations import CHATML, REASONING

from tandem.core.errors import ConfigError
from tandem.text.tool_format import after_reasoning, find_format


def test_auto_takes_the_templates_own_format_else_fence():
    assert [(found.name, native) for found, native in (
        find_format("auto", chat_template=CHATML),
        find_format("auto", chat_template=REASONING),
        find_format("auto", chat_template=None),
        find_format("hermes", chat_template=CHATML),
        find_format("fence", chat_template=REASONING),
    )] == [("fence", False), ("hermes", True), ("fence", False), ("hermes", False), ("fence", False)]


def test_an_unknown_format_names_near_ones():
    with pytest.raises(ConfigError, match=r"model\.tool_format") as caught:
        find_format("hermess", chat_template=None)
    assert caught.value.hint == "did you mean hermes?"


def test_thoughts_are_not_searched_for_calls():
    assert after_reasoning("plain") == 0
    assert after_reasoning("<think>a</think>b") == len("<think>a</think>")
    assert after_reasoning("<think>cut") == len("<think>cut")
