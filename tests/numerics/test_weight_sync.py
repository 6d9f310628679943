"""Case 6: after an update the sampler serves the new weights, all of them; nothing derived from the old ones stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import EngineSection, InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import Completion, GenerateRequest, SamplingParams, Trajectory, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model, load_model
from tandem.models.saver import write_model
from tandem.models.spec import ExpertSpec, RopeSpec
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import SPEC, group_samples

SECTION = EngineSection(infer=InferSection(max_num_seqs=4, kv_tokens=256), train=TrainSection())
PROMPT = ids(range(1, 12))
KINDS = {
    "llama tied": SPEC,
    "llama untied": replace(SPEC, tied_head=False),
    "qwen3 tied": replace(SPEC, family="qwen3", qk_norm=True),
    "gemma3 tied": replace(
        SPEC, family="gemma3_text", qk_norm=True, windows=(5, 0), local_rope=RopeSpec(theta=500.0), query_scalar=8,
        activation="gelu_tanh", unit_offset_norms=True, post_norms=True, scaled_embedding=True,
    ),
    # Few enough experts that a step reaches them all.
    "qwen3 moe": replace(
        SPEC, family="qwen3_moe", qk_norm=True,
        experts=ExpertSpec(num_experts=3, per_token=2, intermediate_size=24, normalised=True),
    ),
    "qwen3 untied": replace(SPEC, family="qwen3", qk_norm=True, tied_head=False),
}


async def greedy(model: CausalLM, weights: PublishedWeights, compute: ComputeQueue) -> Completion:
    engine = InferEngine(model, weights, SECTION, compute, max_context_tokens=64, eos_ids=())
    request = GenerateRequest(
        id="r", prompt_ids=PROMPT, seed=0, params=SamplingParams(max_tokens=10, temperature=0.0)
    )
    answer = await engine.generate(request)
    await engine.close()
    return answer


def as_trajectory(answer: Completion) -> Trajectory:
    before, n = len(PROMPT), len(answer.token_ids)
    return Trajectory(
        episode_id="e", group_id="g", token_ids=PROMPT + answer.token_ids, loss_mask=mask([0] * before + [1] * n),
        logprobs=floats([0.0] * before) + answer.logprobs, versions=ids([-1] * before) + answer.versions,
        num_prompt_tokens=before, temperature=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_moves_everything_that_is_served(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = init_model(KINDS[kind], seed=0, dtype=dtype)
    weights, compute = PublishedWeights(model), ComputeQueue()
    trainer = LocalTrainEngine(
        weights, compute, train=SECTION.train, algorithm=GRPO, total_steps=1,
        optimizer=OptimizerSection(learning_rate=0.05, warmup_steps=0),
    )  # fmt: skip

    async def go() -> tuple[Completion, Completion, list[float]]:
        old = await greedy(model, weights, compute)  # whatever the kernels derive from weights is derived now
        named = weights.digest()
        await trainer.step(make_plan(1, group_samples(), GRPO, SECTION.train))
        version = await trainer.publish()
        assert version.number == weights.version == 1
        assert version.digest == weights.digest() != named
        new = await greedy(model, weights, compute)
        scored = await trainer.score([as_trajectory(new)])
        return old, new, np.frombuffer(scored[0], np.float32)[len(PROMPT) :].tolist()

    before = {name: value.clone() for name, value in model.named_parameters()}
    try:
        old, new, scored = asyncio.run(go())
        assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == []
        assert scored == np.frombuffer(new.logprobs, np.float32).tolist()
        assert new.logprobs != old.logprobs
        (tmp_path / "model").mkdir()
        write_model(model, tmp_path / "model")
        fresh = load_model(tmp_path / "model", dtype=dtype)
        again = asyncio.run(greedy(fresh, PublishedWeights(fresh), compute))
        assert (again.token_ids, again.logprobs) == (new.token_ids, new.logprobs)
    finally:
        compute.close()


def test_a_name_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tandem.core.errors import ModelError

    (tmp_path / "model").mkdir()
    write_model(init_model(SPEC, seed=0, dtype=torch.float32), tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="q_pr"):
        load_model(tmp_path / "model", dtype=torch.float32)
