"""What a reader of pieces must hold back."""

from __future__ import annotations

from tandem.text.tails import longest_tail


def test_the_longest_end_that_may_go_on():
    assert longest_tail("abc", ["cd", "bcx"]) == 2
    assert longest_tail("abc", ["abc"]) == 0
    assert longest_tail("", ["x"]) == 0
