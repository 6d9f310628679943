"""A run that is stopped twice within one pass over its data ends with the very bits of one that was not: dense weights,
adapters, mixtures of experts; on one rank and on two; from any of the last three checkpoints, and after a move."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration
from tandem.config.sections.data import DataSection
from tandem.config.sections.trainer import TrainerSection
from tandem.core.errors import RecordError
from tandem.core.types import ids, mask
from tandem.engine.train.ranks import RankGroup
from tandem.trainer.supervised import SupervisedRun, Unit
from tests.engine.train.test_ranked import KINDS, SECTION, Process, apart, started
from tests.engine.train.tiny import VOCABULARY
from tests.trainer.pieces import MemorySink

LAST = 6  # steps; a pass over the data has 10


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    yield from started(2)


def rows(count: int = 40) -> list[Unit]:
    rng = np.random.default_rng(3)
    streams = [rng.integers(1, VOCABULARY, 4 + n % 9).tolist() for n in range(count)]
    flags = [mask([0, 0] + [1] * (len(stream) - 2)) for stream in streams]
    return [(demonstration(f"r{n}", ids(streams[n]), flags[n]),) for n in range(count)]


def go_on(folder: Path, ranks: RankGroup | None, kind: str, *, to: int, after: int | None = None, seed: int = 0):
    """A new process on the run in ``folder``: from its newest checkpoint, or that of step ``after``, to step ``to``."""
    process = Process(ranks, kind, folder=folder, seed=seed, algorithm=SFT)
    newest = process.store.latest() if after is None else after
    if newest is not None:
        process.store.restore(newest)
    run = SupervisedRun(
        engine=process.engine, algorithm=SFT, train=SECTION, sink=MemorySink(), store=process.store,
        trainer=TrainerSection(steps=to, checkpoint_every=1), data=DataSection(batch_size=4), evaluate=_nothing,
    )  # fmt: skip
    asyncio.run(run.run(rows(), after=newest or 0))
    process.compute.close()
    return process


async def _nothing() -> dict[str, float]:
    return {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_stops_in_one_epoch_change_nothing(pair, kind, num_ranks, tmp_path) -> None:
    ranks = pair if num_ranks == 2 else None
    whole = go_on(tmp_path / "whole", ranks, kind, to=LAST)
    assert whole.store.steps() == [LAST - 2, LAST - 1, LAST]
    go_on(tmp_path / "run", ranks, kind, to=2)
    (tmp_path / "run").rename(tmp_path / "moved")
    go_on(tmp_path / "moved", ranks, kind, to=4, seed=5)
    twice = go_on(tmp_path / "moved", ranks, kind, to=LAST, seed=6)
    assert twice.weights.digest() == whole.weights.digest()
    for step in (LAST - 2, LAST - 1, LAST):
        assert twice.store.digest(step) == whole.store.digest(step)
        again = go_on(tmp_path / "moved", ranks, kind, to=LAST, after=step, seed=7)
        assert again.weights.digest() == whole.weights.digest()
    other = None if ranks else pair  # the same run goes on with another number of ranks
    there = go_on(tmp_path / "moved", other, kind, to=LAST, after=LAST - 2, seed=8)
    ours, theirs = (dict(process.weights.model.named_parameters()) for process in (whole, there))
    assert apart(ours, theirs) < 1e-5


def test_a_full_disk_under_two_ranks_leaves_what_was_saved(pair, small_disk) -> None:
    folder = small_disk / "run"
    go_on(folder, pair, "dense", to=1)
    used = sum(file.stat().st_size for file in (folder / "step-000001").iterdir())
    disk = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(disk.f_bavail * disk.f_frsize - used // 2))
    with pytest.raises(RecordError, match=f"no space left at {small_disk}"):
        go_on(folder, pair, "dense", to=LAST)
    (small_disk / "filler").unlink()
    there = go_on(folder, pair, "dense", to=1, seed=4)  # the group of ranks still works
    assert there.store.steps() == [1]

