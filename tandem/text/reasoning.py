"""Where a model's thoughts end and its answer begins.

Owns: which tags a model thinks between, and splitting text at them while it comes. Invariant: what is given out does
not depend on the pieces that the text comes in. Blanks around thoughts and before the answer belong to neither.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.core.errors import ConfigError
from tandem.text.tails import longest_tail

TAGS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek and most others
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The tags. ``is_opened``: the template writes the first one, so that the answer begins in the middle."""

    opening: str
    closing: str
    is_opened: bool = False


def find_reasoning(name: str, *, chat_template: str | None, turn_opening: str) -> Reasoning | None:
    """The tags called ``name``: ``auto`` (those that the template has, if any), ``none``, or the two themselves with a
    blank between them. ``turn_opening``: what the template writes where the assistant's turn begins.

    Raises:
        ConfigError: it is none of these.
    """
    if name == "none":
        return None
    if name == "auto":
        pair = next((tags for tags in TAGS if tags[1] in (chat_template or "")), None)
    else:
        pair = tuple(name.split())
        if len(pair) != 2:
            raise ConfigError(f"model.reasoning: {name!r} is neither auto nor none nor two tags with a blank between")
    if pair is None:
        return None
    return Reasoning(opening=pair[0], closing=pair[1], is_opened=turn_opening.rstrip().endswith(pair[0]))


class _State(enum.Enum):
    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class ReasoningSplit:
    """Text in; thoughts and answer out, as soon as it is sure which is which."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._tags = reasoning
        self._state = _State.AFTER if reasoning is None else _State.BEFORE
        self._held = ""
        self._trims = False  # blanks before what comes next are dropped
        self.has_thought = False

    @property
    def is_thinking(self) -> bool:
        """What comes next is a thought, or nobody knows."""
        return self._state is not _State.AFTER

    @property
    def num_held(self) -> int:
        """Characters of what came that are not given out yet; blanks that are dropped count as given."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that are now certain."""
        self._held += text
        if self._state is _State.BEFORE:
            self._begin()
        thoughts = self._think() if self._state is _State.INSIDE else ""
        return thoughts, self._say() if self._state is _State.AFTER else ""

    def finish(self) -> tuple[str, str]:
        """What was held back. Thoughts that were cut are thoughts."""
        held, self._held = self._held, ""
        cut = self._state is _State.BEFORE and self._tags is not None and self._tags.is_opened
        self.has_thought = self.has_thought or cut and bool(held.strip())
        if cut or self._state is _State.INSIDE:
            return (held.lstrip() if self._trims else held).rstrip(), ""
        return ("", "") if self._trims else ("", held)

    def _begin(self) -> None:
        assert self._tags is not None
        text = self._held.lstrip()
        if text.startswith(self._tags.opening):
            self._held = text[len(self._tags.opening) :]
            self._state, self._trims, self.has_thought = _State.INSIDE, True, True
        elif not self._tags.opening.startswith(text):
            self._state = _State.INSIDE if self._tags.is_opened else _State.AFTER
            self._trims = self.has_thought = self._tags.is_opened

    def _think(self) -> str:
        assert self._tags is not None
        text = self._held.lstrip() if self._trims else self._held
        place = text.find(self._tags.closing)
        if place >= 0:
            self._state, self._trims = _State.AFTER, True
            self._held = text[place + len(self._tags.closing) :]
            return text[:place].rstrip()
        kept = text.rstrip()
        kept = kept[: len(kept) - longest_tail(kept, [self._tags.closing])].rstrip()
        self._trims = self._trims and not kept
        self._held = text[len(kept) :]
        return kept

    def _say(self) -> str:
        text, self._held = self._held, ""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
