"""Sampling by weights in 8 bits: its own bits in every batch, the live weights at each publish, a gap that is told."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import EngineSection, InferSection, TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError, ModelError
from tandem.core.types import Completion, GenerateRequest, SamplingParams, ids
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.kernels import self_check
from tandem.kernels.impl.cpu import projection
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.lora import LoraSpec, add_adapters
from tandem.models.spec import ModelSpec
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import group_samples

pytestmark = pytest.mark.skipif(not projection.road(), reason="no packed projections on this machine")
SPEC = ModelSpec(
    family="llama", vocab_size=100, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, max_positions=256, tied_head=True,
)  # fmt: skip
SECTION = EngineSection(infer=InferSection(max_num_seqs=8, kv_tokens=2048, max_step_tokens=24))


def made(*, quantised: bool = True, is_alone: bool = False) -> CausalLM:
    model = init_model(SPEC, seed=3, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)  # differences that can be seen
    if quantised:
        model.quantise(is_alone=is_alone)
    return model


def asked(number: int) -> GenerateRequest:
    prompt = ids(np.random.default_rng(number).integers(0, 100, 5 + 7 * number).tolist())
    return GenerateRequest(id=f"r{number}", prompt_ids=prompt, seed=number, params=SamplingParams(max_tokens=12))


async def answers(model: CausalLM, *numbers: int, weights: PublishedWeights | None = None) -> list[Completion]:
    compute = ComputeQueue()
    weights = weights or PublishedWeights(model)
    engine = InferEngine(model, weights, SECTION, compute, max_context_tokens=128, eos_ids=())
    try:
        return await asyncio.gather(*(engine.generate(asked(number)) for number in numbers))
    finally:
        await engine.close()
        compute.close()


def told(answer: Completion) -> tuple[list[int], list[float]]:
    return answer.token_ids.tolist(), answer.logprobs.tolist()


def test_an_answer_has_the_same_bits_alone_and_in_a_crowd() -> None:
    model = made()
    crowd = asyncio.run(answers(model, *range(7)))
    for number in range(7):
        assert told(asyncio.run(answers(model, number))[0]) == told(crowd[number])
    plain = asyncio.run(answers(made(quantised=False), *range(7)))
    gaps = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in zip(crowd, plain, strict=True)]
    assert 0 < max(gaps) < 0.5


def test_one_that_serves_alone_holds_nothing_else_and_answers_alike() -> None:
    alone = made(is_alone=True)
    assert sum(weight.isnan().all() for weight in alone.parameters()) == 4 * SPEC.num_layers
    assert told(asyncio.run(answers(alone, 4))[0]) == told(asyncio.run(answers(made(), 4))[0])


def test_a_step_renews_the_whole_numbers_and_tells_the_gap() -> None:
    model = made()
    weights, compute = PublishedWeights(model), ComputeQueue()
    trainer = LocalTrainEngine(
        weights, compute, train=TrainSection(), algorithm=GRPO, total_steps=1,
        optimizer=OptimizerSection(learning_rate=0.05, warmup_steps=0),
    )  # fmt: skip

    async def go() -> tuple[Completion, Completion, dict[str, float]]:
        (old,) = await answers(model, 2, weights=weights)
        result = await trainer.step(make_plan(1, group_samples(), GRPO, TrainSection()))
        version = await trainer.publish()
        assert version.digest == weights.digest()
        (new,) = await answers(model, 2, weights=weights)
        return old, new, result.metrics

    try:
        old, new, metrics = asyncio.run(go())
        assert told(new) != told(old) and set(new.versions) == {1}
        again = made(quantised=False)
        again.load_state_dict(model.state_dict())
        again.quantise()
        assert told(asyncio.run(answers(again, 2))[0]) == told(new)
        assert 0 < metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"]
        served = model.ops.whole(model.layers[0].mlp.down.weight)
        served[11] ^= 1
        with pytest.raises(EngineError, match=r"first layers.0.mlp.down.weight"):
            weights.verify()
    finally:
        compute.close()


def test_who_cannot_is_told_why() -> None:
    with pytest.raises(ModelError, match="not bfloat16"):
        init_model(SPEC, seed=0, dtype=torch.float32).quantise()
    with pytest.raises(ModelError, match="adapters"):
        add_adapters(init_model(SPEC, seed=0, dtype=torch.bfloat16), LoraSpec(rank=2, alpha=2.0), seed=0).quantise()


def test_products_that_are_wrong_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    self_check.prove_whole(model.ops)
    right = self_check.whole.linear

    def wrong(x_TK: torch.Tensor, *given: object, road: int) -> torch.Tensor:
        return right(x_TK, *given, road=road) + (len(x_TK) == 7)  # type: ignore[arg-type]

    monkeypatch.setattr(self_check.whole, "linear", wrong)
    with pytest.raises(EngineError, match="products of 7 rows"):
        self_check.prove_whole(model.ops)
