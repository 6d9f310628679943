"""Supervised steps: seeded batches, their own phase in the log."""

from __future__ import annotations

import asyncio

import pytest

from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.warmup import WarmupSection
from tandem.core.errors import ConfigError
from tandem.core.events import StepFinished
from tandem.core.types import ids, mask
from tandem.trainer.warmup import batches, warm_up
from tests.trainer.pieces import CountingEngine, MemorySink

SAMPLES = [demonstration(f"d{i}", ids([1, i, 3]), mask([0, 1, 1])) for i in range(10)]


def names(chosen) -> list[list[str]]:
    return [[sample.trajectory.episode_id for sample in batch] for batch in chosen]


def test_batches_depend_on_the_seed_alone_and_use_every_sample_before_any_twice() -> None:
    first = names(batches(SAMPLES, batch_size=4, steps=5, seed=1))
    assert first == names(batches(SAMPLES, batch_size=4, steps=5, seed=1))
    assert first != names(batches(SAMPLES, batch_size=4, steps=5, seed=2))
    flat = [name for batch in first for name in batch]
    assert len(set(flat[:10])) == 10 and len(set(flat[10:])) == 10
    assert len(next(iter(batches(SAMPLES[:3], batch_size=8, steps=1, seed=0)))) == 8


def test_warm_up_steps_are_marked_and_never_counted_as_reinforcement() -> None:
    engine, sink, versions = CountingEngine(), MemorySink(), []

    async def on_version(version) -> None:
        versions.append(version.number)

    asyncio.run(
        warm_up(
            engine, SAMPLES, SFT, section=WarmupSection(steps=3, batch_size=4), train=TrainSection(), seed=0,
            sink=sink, on_version=on_version,
        )
    )  # fmt: skip
    assert [(e.step, e.phase, e.num_samples) for e in sink.of(StepFinished)] == [(n, "warmup", 4) for n in (1, 2, 3)]
    assert versions == [1, 2, 3]
    assert all(plan.num_loss_tokens == 8 and plan.num_sequences == 4 for plan in engine.plans)


def test_no_demonstrations_is_said() -> None:
    with pytest.raises(ConfigError, match="demonstrations"):
        next(batches([], batch_size=1, steps=1, seed=0))
