"""What the sampler reports is what the trainer computes, bit for bit, before and after updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import EngineSection, InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import Completion, GenerateRequest, Ids, Sample, SamplingParams, Trajectory, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.spec import ExpertSpec, RopeSpec
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


def three_steps(model: CausalLM, train: TrainSection) -> None:
    """Groups of one prompt each, prefilled in chunks beside decoding, with prefix cache, at several lengths: at each
    of three steps the trainer finds no gap, and its update changes what is found next."""
    section = EngineSection(
        infer=InferSection(max_num_seqs=5, max_step_tokens=16, block_size=4, kv_tokens=1024), train=train
    )
    weights, compute = PublishedWeights(model), ComputeQueue()
    sampler = InferEngine(weights.model, weights, section, compute, max_context_tokens=128, eos_ids=())
    trainer = LocalTrainEngine(
        weights, compute, train=train, algorithm=GRPO, total_steps=3,
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
            result = await trainer.step(make_plan(step, samples, GRPO, train))
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


FAMILIES = {
    # Windows of less than a prompt, but not on the last layer; rotary bases that differ; no whole blocks in the MLP.
    "gemma3_text": replace(
        SPEC, family="gemma3_text", num_layers=3, head_dim=16, intermediate_size=75, qk_norm=True, windows=(6, 6, 0),
        local_rope=RopeSpec(theta=500.0), query_scalar=24, activation="gelu_tanh", unit_offset_norms=True,
        post_norms=True, scaled_embedding=True,
    ),
    "qwen3_moe": replace(
        SPEC, family="qwen3_moe", num_layers=3, head_dim=16, qk_norm=True, tied_head=False,
        experts=ExpertSpec(num_experts=5, per_token=2, intermediate_size=48, normalised=True, dense_layers=(1,)),
    ),
}  # fmt: skip


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_have_no_gap_either(family: str, dtype: torch.dtype, threads: int) -> None:
    model = init_model(FAMILIES[family], seed=0, dtype=dtype)
    three_steps(model, TrainSection(micro_batch_tokens=64, share_prefixes=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "share"), [(4096, True), (40, True), (64, False)])
def test_three_steps_on_policy_have_no_gap_at_all(dtype, tokens, share) -> None:
    three_steps(tiny_model(dtype=dtype), TrainSection(micro_batch_tokens=tokens, share_prefixes=share))
