"""Stale samples and several passes over them: the ratio is that of the weights in training to those that sampled."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from tandem.algorithms.catalog.grpo import DAPO
from tandem.algorithms.spec import Importance
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.events import GroupDropped
from tandem.core.types import Sample, Trajectory, ids
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.trainer.batcher import Batcher
from tandem.trainer.scoring import with_old
from tests.engine.train.tiny import group_samples, tiny_model
from tests.trainer.pieces import MemorySink, record

SECTION = TrainSection(micro_batch_tokens=64)
TWICE = dataclasses.replace(DAPO, passes=2, minibatches=2)
MOVING = OptimizerSection(learning_rate=3e-3, warmup_steps=0)


class Run:
    """A model, and samples that it has drawn: their log-probabilities are those of its first weights."""

    def __init__(self, method=TWICE) -> None:
        self.weights, self.compute, self.sink = PublishedWeights(tiny_model()), ComputeQueue(), MemorySink()
        self.engine = LocalTrainEngine(
            self.weights, self.compute, train=SECTION, optimizer=MOVING, algorithm=method, total_steps=9
        )
        self.batcher = Batcher(method, SECTION, staleness=1, sink=self.sink)

    async def drawn(self, seed: int) -> list[Sample]:
        samples = group_samples(seed=seed)
        streams = await self.engine.score([sample.trajectory for sample in samples])
        named = enumerate(zip(samples, streams, strict=True))
        return [
            dataclasses.replace(
                sample,
                trajectory=dataclasses.replace(
                    sample.trajectory, logprobs=stream, group_id=f"g{number // 3}",
                    versions=ids([self.weights.version] * len(stream)),
                ),
            )
            for number, (sample, stream) in named
        ]  # fmt: skip


def ratios(trajectories: list[Trajectory], now: list, before: list) -> list[float]:
    """exp(new - old) of every token that learns, in float64."""
    found: list[float] = []
    for trajectory, new, old in zip(trajectories, now, before, strict=True):
        learns = np.array(trajectory.loss_mask) != 0
        found += np.exp(np.array(new, dtype=np.float64) - np.array(old, dtype=np.float64))[learns].tolist()
    return found


def test_the_ratio_is_new_against_the_sampler_in_every_pass_of_a_stale_step() -> None:
    async def go() -> None:
        run = Run()
        steps = [await run.drawn(1), await run.drawn(2)]  # both under version 0; the second is trained on one step late
        largest = 0.0
        for step, samples in enumerate(steps, start=1):
            for number, plan in enumerate(run.batcher.plans(step, samples)):
                trajectories = [sample.trajectory for row in plan.rows for sample in row]
                now = await run.engine.score(trajectories)
                wanted = ratios(trajectories, now, [trajectory.logprobs for trajectory in trajectories])
                result = await run.engine.step(plan)
                assert result.metrics["ratio_mean"] == pytest.approx(np.mean(wanted), abs=1e-5)
                assert result.metrics["ratio_max"] == pytest.approx(max(wanted), abs=1e-5)
                fresh = step == 1 and number == 0
                assert (result.metrics["ratio_max"] == 1.0) is fresh  # exactly on-policy once, and then never again
                largest = max(largest, max(wanted))
        assert run.weights.version == 8 and largest > 1.05
        run.compute.close()

    asyncio.run(go())


def test_with_importance_weights_the_ratio_is_new_against_the_first_weights_of_the_step() -> None:
    method = dataclasses.replace(TWICE, importance=Importance.TRUNCATED)

    async def go() -> None:
        run = Run(method)
        first, second = await run.drawn(1), await run.drawn(2)
        for samples, step in ((first, 1), (second, 2)):
            dressed = await with_old(samples, run.engine.score)
            old = {id(sample.trajectory): sample.old_logprobs for sample in dressed}
            for number, plan in enumerate(run.batcher.plans(step, dressed)):
                trajectories = [sample.trajectory for row in plan.rows for sample in row]
                now = await run.engine.score(trajectories)
                wanted = ratios(trajectories, now, [old[id(trajectory)] for trajectory in trajectories])
                result = await run.engine.step(plan)
                assert result.metrics["ratio_mean"] == pytest.approx(np.mean(wanted), abs=1e-5)
                assert (result.metrics["ratio_max"] == 1.0) is (number == 0)  # in the stale step too
        run.compute.close()

    asyncio.run(go())


def test_staleness_counts_the_updates_of_a_step() -> None:
    sink = MemorySink()
    batcher = Batcher(TWICE, SECTION, staleness=1, sink=sink)
    groups = [record(f"g{version}", (1.0, 0.0), version=version) for version in (0, 3, 4)]
    admitted = batcher.admit(groups, version=4)
    assert admitted.num_groups == 3 and not sink.of(GroupDropped) and admitted.metrics["staleness_max"] == 4
    admitted = batcher.admit(groups, version=5)
    assert [dropped.group_id for dropped in sink.of(GroupDropped)] == ["g0"] and admitted.num_groups == 2
