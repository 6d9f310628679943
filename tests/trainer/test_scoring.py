"""Reference streams reach their samples."""

from __future__ import annotations

import asyncio

import pytest

from tandem.algorithms.catalog.grpo import GRPO
from tandem.config.sections.engine import TrainSection
from tandem.trainer.batcher import Batcher
from tandem.trainer.scoring import with_reference
from tests.trainer.pieces import CountingEngine, MemorySink, record


def test_every_sample_gets_its_own_stream() -> None:
    samples = (
        Batcher(GRPO, TrainSection(), staleness=0, sink=MemorySink())
        .admit([record("a", [1.0, 0.0])], version=0)
        .samples
    )
    scored = asyncio.run(with_reference(samples, CountingEngine().score))
    assert [len(s.reference_logprobs or ()) for s in scored] == [4, 5]
    assert [s.trajectory for s in scored] == [s.trajectory for s in samples]


def test_a_missing_stream_is_an_error() -> None:
    samples = (
        Batcher(GRPO, TrainSection(), staleness=0, sink=MemorySink())
        .admit([record("a", [1.0, 0.0])], version=0)
        .samples
    )

    async def short(trajectories):
        return (await CountingEngine().score(trajectories))[:1]

    with pytest.raises(ValueError, match="zip"):
        asyncio.run(with_reference(samples, short))
