"""Common beginnings of token streams: what a forward pass over several of them has to compute once.

Owns: who shares how much with whom. Used by the planner that counts tokens and the packer that lays them out,
so that both always agree. Pure and exact: equality of ids, nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.core.types import Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The first ``length`` tokens of a stream are those of stream ``parent`` (-1: of none)."""

    parent: int
    length: int


def common_length(left: Ids, right: Ids) -> int:
    """How many leading ids two streams have in common."""
    shortest = min(len(left), len(right))
    differs = np.frombuffer(left, dtype=np.int32)[:shortest] != np.frombuffer(right, dtype=np.int32)[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def longest_shared(stream: Ids, earlier: Sequence[Ids]) -> SharedPrefix:
    """The earlier stream that ``stream`` shares the most with (the first of equals)."""
    best = SharedPrefix(parent=-1, length=0)
    for index, other in enumerate(earlier):
        length = common_length(stream, other)
        if length > best.length:
            best = SharedPrefix(parent=index, length=length)
    return best


def num_distinct(streams: Sequence[array]) -> int:
    """Tokens that a pass over the streams computes when every common beginning is computed once."""
    return sum(len(stream) - longest_shared(stream, streams[:index]).length for index, stream in enumerate(streams))
