"""Scores are the training forward pass's numbers; frozen copies stay as they were."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import TrainSection
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.score import Scorer, frozen_copy
from tandem.trainer.scoring import with_reference
from tests.engine.train.tiny import group_samples, tiny_model, train


def scores(model, trajectories, section: TrainSection | None = None):
    compute = ComputeQueue()
    try:
        return asyncio.run(Scorer(model, compute, section or TrainSection()).score(trajectories))
    finally:
        compute.close()


def test_streams_fit_their_trajectories_and_do_not_depend_on_the_packing() -> None:
    trajectories = [s.trajectory for s in group_samples(temperature=0.8)]
    model = tiny_model()
    whole = scores(model, trajectories)
    assert [len(s) for s in whole] == [len(t.token_ids) for t in trajectories]
    assert all(s[0] == 0.0 and max(s[1:]) < 0 for s in whole)
    for tokens, share in ((16, True), (50, False), (4096, False)):
        assert scores(model, trajectories, TrainSection(micro_batch_tokens=tokens, share_prefixes=share)) == whole


def test_training_on_own_scores_is_exactly_on_policy() -> None:
    model = tiny_model()
    samples = group_samples()
    streams = scores(model, [s.trajectory for s in samples])
    on_policy = [
        dataclasses.replace(s, trajectory=dataclasses.replace(s.trajectory, logprobs=stream))
        for s, stream in zip(samples, streams, strict=True)
    ]
    (result,) = train(model, GRPO, on_policy, section=TrainSection(micro_batch_tokens=40))
    assert result.metrics["logprob_gap_max"] == 0.0
    assert result.metrics["ratio_mean"] == 1.0 and result.metrics["kl_sampler_k3"] == 0.0


def test_a_frozen_copy_keeps_the_reference_and_pulls_towards_it() -> None:
    model = tiny_model()
    reference = frozen_copy(model)
    trajectories = [s.trajectory for s in group_samples()]
    before = scores(model, trajectories)
    spec = dataclasses.replace(GRPO, kl_weight=0.5)
    compute = ComputeQueue()
    try:
        samples = asyncio.run(with_reference(group_samples(), Scorer(reference, compute, TrainSection()).score))
    finally:
        compute.close()
    first, *_, last = train(model, spec, samples, steps=4)
    assert first.metrics["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert last.metrics["kl_reference"] > 0
    assert scores(reference, trajectories) == before != scores(model, trajectories)
    assert not any(p.requires_grad for p in reference.parameters())
    assert not torch.equal(next(reference.parameters()), next(model.parameters()))
