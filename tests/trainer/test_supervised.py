"""Which rows make which step."""

from __future__ import annotations

import itertools

from tandem.algorithms.credit import demonstration
from tandem.core.types import ids, mask
from tandem.trainer.supervised import batches

UNITS = [(demonstration(f"{n}", ids([1, 2]), mask([0, 1])),) for n in range(5)]


def names(*, shuffle: bool, seed: int = 0, count: int = 5) -> list[str]:
    taken = itertools.islice(batches(UNITS, batch_size=3, seed=seed, shuffle=shuffle), count)
    return [unit[0].trajectory.episode_id for batch in taken for unit in batch]


def test_every_row_comes_once_a_pass() -> None:
    drawn = names(shuffle=True)
    for begin in (0, 5, 10):
        assert sorted(drawn[begin : begin + 5]) == list("01234")
    assert drawn == names(shuffle=True) != names(shuffle=True, seed=1)
    assert names(shuffle=False) == list("012340123401234")
