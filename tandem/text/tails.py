"""The end of a text that may become something: what a reader of pieces must hold back."""

from __future__ import annotations

from collections.abc import Sequence


def longest_tail(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning, but not the whole, of one of ``words``."""
    longest = max((len(word) for word in words), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in words if len(word) > length):
            return length
    return 0
