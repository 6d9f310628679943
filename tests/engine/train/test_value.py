"""Critics and reward models: values where they belong, losses as written out, something learned."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from bare_methods import PPO

from tandem.algorithms.catalog.preference import REWARD
from tandem.algorithms.credit import demonstration, preference, settle
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.value import CriticEngine, RewardModelEngine, ValueModel, value_losses
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import group_samples, tiny_model

STILL = OptimizerSection(learning_rate=0.0, warmup_steps=0, beta1=0.0, max_grad_norm=0.0)
FAST = OptimizerSection(learning_rate=3e-2, warmup_steps=0)


def test_value_loss_is_the_worse_of_plain_and_clipped() -> None:
    values, returns, old = torch.tensor([1.0, 0.1, 0.9]), torch.tensor([2.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 0.8])
    assert value_losses(values, returns, old, None).tolist() == pytest.approx([0.5, 0.005, 0.605], abs=1e-6)
    assert value_losses(values, returns, old, 0.2).tolist() == pytest.approx([1.62, 0.005, 0.605], abs=1e-6)


def with_returns(samples):
    scored = [dataclasses.replace(s, reward=1.0, values=floats([0.0] * len(s.advantages))) for s in samples]
    return settle(PPO, scored)


def critic(section: TrainSection, compute: ComputeQueue, optimizer: OptimizerSection = STILL) -> CriticEngine:
    return CriticEngine(
        ValueModel(tiny_model()), compute, train=section, optimizer=optimizer, clip=None, total_steps=9
    )


def test_the_gradient_of_a_critic_depends_on_no_split() -> None:
    samples, found = with_returns(group_samples()), []
    for section in (TrainSection(micro_batch_tokens=16, share_prefixes=False), TrainSection()):
        compute = ComputeQueue()
        engine = critic(section, compute)
        torch.manual_seed(0)
        torch.nn.init.normal_(engine.model.head.weight)
        try:
            metrics = asyncio.run(engine.step(make_plan(1, samples, PPO, section)))
        finally:
            compute.close()
        found.append((metrics["value_loss"], engine.optimizer.moments()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and found[0][0] > 0
    for name, moment in found[0][1].items():
        if name.startswith("exp_avg."):
            assert torch.allclose(moment, found[1][1][name], atol=1e-5), name


def test_a_critic_learns_returns_and_reads_what_came_before() -> None:
    samples = with_returns(group_samples(num_groups=1, size=2))
    compute, section = ComputeQueue(), TrainSection()
    engine = critic(section, compute, FAST)

    async def go() -> tuple[float, float, list]:
        losses = []
        for step in range(1, 16):
            losses.append((await engine.step(make_plan(step, samples, PPO, section)))["value_loss"])
        return losses[0], losses[-1], await engine.values([s.trajectory for s in samples])

    try:
        first, last, values = asyncio.run(go())
    finally:
        compute.close()
    assert last < 0.2 * first
    one = samples[0].trajectory
    changed = dataclasses.replace(one, token_ids=ids([*one.token_ids[:-1], (one.token_ids[-1] + 1) % 40 + 1]))
    compute = ComputeQueue()
    engine._compute = compute
    try:
        again = asyncio.run(engine.values([changed]))[0]
    finally:
        compute.close()
    assert np.allclose(again, values[0], atol=1e-5), "the value of a token knew the token"


def test_a_reward_model_learns_to_prefer() -> None:
    pairs = []
    rng = np.random.default_rng(0)
    for number in range(6):
        start = rng.integers(1, 40, 4).tolist()
        two = [demonstration(f"{number}{end}", ids([*start, end]), mask([0, 0, 0, 0, 1])) for end in (41, 42)]
        pairs += preference(*two)
    compute, section = ComputeQueue(), TrainSection(micro_batch_tokens=32)
    engine = RewardModelEngine(
        ValueModel(tiny_model()), compute, train=section, optimizer=FAST, algorithm=REWARD, total_steps=20
    )
    plan = make_plan(1, pairs, REWARD, section)
    assert len(plan.rows) > 1 and all(len(row) % 2 == 0 for row in plan.rows)

    async def go():
        results = [await engine.step(dataclasses.replace(plan, step=step)) for step in range(1, 21)]
        return results, await engine.scores([sample.trajectory for sample in pairs])

    try:
        results, scores = asyncio.run(go())
    finally:
        compute.close()
    assert results[0].loss == pytest.approx(np.log(2), abs=1e-6)  # the head starts at 0
    assert results[-1].metrics["pair_accuracy"] == 1.0 and results[-1].loss < 0.1
    assert all(better > worse for better, worse in zip(scores[::2], scores[1::2], strict=True))
