"""A model small enough to train in milliseconds, and samples for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from tandem.algorithms.losses import OwnLoss
from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import BatchPlan, Sample, StepResult, Trajectory, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.spec import ModelSpec
from tandem.trainer.batcher import make_plan

VOCABULARY = 48
SPEC = ModelSpec(
    family="llama", vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=64, max_positions=256, tied_head=True,
)  # fmt: skip
FLAT_RATE = OptimizerSection(learning_rate=1e-2, warmup_steps=0)


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> CausalLM:
    return init_model(SPEC, seed=seed, dtype=dtype, device="cpu", numerics="exact")


def sample(
    token_ids: Sequence[int],
    flags: Sequence[int],
    *,
    advantage: float = 1.0,
    logprob: float = -3.8,
    version: int = 0,
    name: str = "e",
    temperature: float = 1.0,
) -> Sample:
    n = len(token_ids)
    return Sample(
        trajectory=Trajectory(
            episode_id=name, group_id="g", token_ids=ids(token_ids), loss_mask=mask(flags),
            logprobs=floats([logprob * f for f in flags]), versions=ids([version if f else -1 for f in flags]),
            num_prompt_tokens=next((i for i, f in enumerate(flags) if f), n), temperature=temperature,
        ),
        advantages=floats([advantage * f for f in flags]),
        rl_weights=floats(flags),
        ce_weights=floats([0.0] * n),
    )  # fmt: skip


def group_samples(
    *, seed: int = 0, num_groups: int = 2, size: int = 4, prompt_tokens: int = 9, temperature: float = 1.0
) -> list[Sample]:
    """Groups that share prompts; answers of several lengths, some with an observation in the middle, some with
    a second branch that leaves the first one late."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        prompt = rng.integers(1, VOCABULARY, prompt_tokens).tolist()
        for index in range(size):
            answer = rng.integers(1, VOCABULARY, 3 + 2 * index).tolist()
            flags = [1] * len(answer)
            if index % 2:
                flags[1:3] = [0, 0]
            samples.append(
                sample(
                    prompt + answer, [0] * prompt_tokens + flags, advantage=float(rng.normal()),
                    logprob=float(rng.uniform(-4.2, -3.5)), name=f"g{group}.{index}", temperature=temperature,
                )
            )  # fmt: skip
        branch = prompt + answer[:5] + rng.integers(1, VOCABULARY, 4).tolist()
        samples.append(
            sample(
                branch, [0] * (prompt_tokens + 5) + [1] * 4, advantage=-0.7, name=f"g{group}.b", temperature=temperature
            )
        )
    return samples


def train(
    model: CausalLM,
    spec: AlgorithmSpec,
    samples: Sequence[Sample],
    *,
    section: TrainSection | None = None,
    steps: int = 1,
    optimizer: OptimizerSection = FLAT_RATE,
    plan: BatchPlan | None = None,
) -> list[StepResult]:
    """A few steps of the real engine on the same samples."""
    section = section or TrainSection()
    compute = ComputeQueue()
    engine = LocalTrainEngine(
        PublishedWeights(model), compute, train=section, optimizer=optimizer, algorithm=spec, total_steps=steps
    )

    async def go() -> list[StepResult]:
        return [await engine.step(plan or make_plan(step, samples, spec, section)) for step in range(1, steps + 1)]

    try:
        return asyncio.run(go())
    finally:
        compute.close()


def gradients(
    model: CausalLM,
    spec: AlgorithmSpec,
    samples: Sequence[Sample],
    section: TrainSection,
    loss: OwnLoss | None = None,
) -> dict[str, torch.Tensor]:
    """The step's gradient, read from the first moment of an optimizer without memory and without clipping."""
    compute = ComputeQueue()
    still = OptimizerSection(learning_rate=0.0, warmup_steps=0, beta1=0.0, max_grad_norm=0.0)
    engine = LocalTrainEngine(
        PublishedWeights(model), compute, train=section, optimizer=still, algorithm=spec, total_steps=1
    )
    try:
        asyncio.run(engine.step(make_plan(1, samples, spec, section), loss=loss))
    finally:
        compute.close()
    return {
        name.removeprefix("exp_avg."): value.clone()
        for name, value in engine.optimizer.moments().items()
        if name.startswith("exp_avg.")
    }
