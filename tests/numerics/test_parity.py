"""What the sampler reports is what the trainer computes, bit for bit, before and after updates."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tandem.algorithms.catalog.grpo import GRPO
from tandem.config.sections.engine import EngineSection, InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import Completion, GenerateRequest, Ids, Sample, SamplingParams, Trajectory, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import SPEC, tiny_model

TEMPERATURE = 0.8


def learned(prompt: Ids, completion: Completion, advantage: float) -> Sample:
    before, n = len(prompt), len(completion.token_ids)
    flags = [0.0] * before + [1.0] * n
    return Sample(
        trajectory=Trajectory(
            episode_id=completion.request_id,
            group_id="g",
            token_ids=prompt + completion.token_ids,
            loss_mask=mask([0] * before + [1] * n),
            logprobs=floats([0.0] * before) + completion.logprobs,
            versions=ids([-1] * before) + completion.versions,
            num_prompt_tokens=before,
            temperature=TEMPERATURE,
        ),
        advantages=floats([advantage * flag for flag in flags]),
        rl_weights=floats(flags),
        ce_weights=floats([0.0] * len(flags)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "share"), [(4096, True), (40, True), (64, False)])
def test_three_steps_on_policy_have_no_gap_at_all(dtype, tokens, share) -> None:
    """Groups of one prompt each, prefilled in chunks beside decoding, with prefix cache, at several lengths."""
    section = EngineSection(
        infer=InferSection(max_num_seqs=5, max_step_tokens=16, block_size=4, kv_tokens=1024),
        train=TrainSection(micro_batch_tokens=tokens, share_prefixes=share),
    )
    weights, compute = PublishedWeights(tiny_model(dtype=dtype)), ComputeQueue()
    sampler = InferEngine(weights.model, weights, section, compute, max_context_tokens=128, eos_ids=())
    trainer = LocalTrainEngine(
        weights, compute, train=section.train, algorithm=GRPO, total_steps=3,
        optimizer=OptimizerSection(learning_rate=3e-3, warmup_steps=0),
    )  # fmt: skip
    rng = np.random.default_rng(0)

    async def attempt(prompt: Ids, step: int, index: int) -> Sample:
        request = GenerateRequest(
            id=f"{step}.{len(prompt)}.{index}", prompt_ids=prompt, seed=100 * step + index,
            params=SamplingParams(max_tokens=5 + 3 * index, temperature=TEMPERATURE),
        )  # fmt: skip
        return learned(prompt, await sampler.generate(request), advantage=float(rng.normal()))

    async def go() -> None:
        prompts = [ids(rng.integers(1, SPEC.vocab_size, length).tolist()) for length in (7, 23)]
        for step in (1, 2, 3):
            samples = await asyncio.gather(*(attempt(p, step, i) for p in prompts for i in range(4)))
            assert {v for s in samples for v in s.trajectory.versions} == {-1, weights.version}
            result = await trainer.step(make_plan(step, samples, GRPO, section.train))
            assert result.metrics["logprob_gap_max"] == 0.0
            assert result.metrics["ratio_mean"] == result.metrics["ratio_max"] == 1.0
            assert result.grad_norm > 0
            scored = await trainer.score([s.trajectory for s in samples])
            assert scored[0][-1] != samples[0].trajectory.logprobs[-1]  # the weights have moved
        await sampler.close()

    try:
        asyncio.run(go())
    finally:
        compute.close()
