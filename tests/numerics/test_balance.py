"""The loss that spreads tokens over experts: against its formula, and the same however a step is cut."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import ConfigError
from tandem.core.types import Sample
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.batch import lay_out
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.routes import RouteReplay
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import group_samples, tiny_model
from tests.numerics.test_parity import FAMILIES

SPEC = replace(FAMILIES["qwen3_moe"], vocab_size=48)
WEIGHT = 5.0


def mixture(dtype: torch.dtype = torch.float32) -> CausalLM:
    return init_model(SPEC, seed=0, dtype=dtype)


def gradients(samples: list[Sample], **train: object) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    """The gradient of one step, read from an optimizer without memory; its metrics and its loss."""
    section = TrainSection(**({"balance_weight": WEIGHT, "micro_batch_tokens": 4096} | train))
    compute = ComputeQueue()
    engine = LocalTrainEngine(
        PublishedWeights(mixture()), compute, train=section, algorithm=GRPO, total_steps=1,
        optimizer=OptimizerSection(learning_rate=0.0, warmup_steps=0, beta1=0.0, max_grad_norm=0.0),
    )  # fmt: skip
    try:
        result = asyncio.run(engine.step(make_plan(1, samples, GRPO, section)))
    finally:
        compute.close()
    moments = engine.optimizer.moments()
    found = {name.removeprefix("exp_avg."): value.clone() for name, value in moments.items() if "exp_avg." in name}
    return found, result.metrics, result.loss


def by_formula(samples: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """The same in float64, sequence after sequence, each computed whole."""
    model = mixture(torch.float32).double()
    experts = SPEC.experts
    assert experts is not None
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        layout = lay_out([sample.trajectory.token_ids[:-1]], share_prefixes=False, device=torch.device("cpu"))
        context = layout.context()
        model(layout.ids_T, layout.positions_T, context)
        assert isinstance(context.routes, RouteReplay)
        rows = [t - 1 for t, weight in enumerate(sample.rl_weights) if weight]
        for routed in context.routes.routed.values():
            for x in range(experts.num_experts):
                f = sum(int(x in routed.chosen_TK[t].tolist()) for t in rows) / len(rows) / experts.per_token
                mean = torch.stack([routed.chances_TX[t, x] for t in rows]).double().mean()
                total = total + experts.num_experts * f * mean / len(SPEC.mixtures) / len(samples)
    total.backward()
    grads = {name: WEIGHT * value.grad for name, value in model.named_parameters() if value.grad is not None}
    return float(total.detach()), grads


def test_loss_and_gradient_are_the_formulas():
    samples = group_samples()
    (ours, metrics, loss), (without, _, alone) = gradients(samples), gradients(samples, balance_weight=0.0)
    value, theirs = by_formula(samples)
    assert metrics["imbalance"] == pytest.approx(value, abs=1e-5) and value > 1.0
    assert loss == alone  # of the method by itself
    routers = [name for name in theirs if "router" in name]
    assert len(routers) == len(SPEC.mixtures)
    for name, grad in theirs.items():
        torch.testing.assert_close((ours[name] - without[name]).double(), grad, atol=5e-6, rtol=1e-3)
    assert max(float(theirs[name].abs().max()) for name in routers) > 1e-3


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch_tokens": 40}, {"share_prefixes": False}, {"checkpoint_activations": True},
     {"micro_batch_tokens": 24, "share_prefixes": False, "checkpoint_activations": True}],
)  # fmt: skip
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(changes: dict[str, object]):
    samples = group_samples()
    whole, metrics, _ = gradients(samples)
    order = np.random.default_rng(1).permutation(len(samples))
    cut, cut_metrics, _ = gradients([samples[index] for index in order], **changes)
    assert cut_metrics["imbalance"] == pytest.approx(metrics["imbalance"], abs=1e-6)
    for name, grad in whole.items():
        torch.testing.assert_close(cut[name], grad, atol=1e-6, rtol=1e-4)
    without, _, _ = gradients(samples, balance_weight=0.0)
    assert any(not torch.equal(without[name], grad) for name, grad in whole.items() if "router" in name)


def test_a_model_without_experts_refuses_the_weight():
    compute = ComputeQueue()
    try:
        with pytest.raises(ConfigError, match="balance_weight"):
            LocalTrainEngine(
                PublishedWeights(tiny_model()), compute, train=TrainSection(balance_weight=0.1), algorithm=GRPO,
                total_steps=1, optimizer=OptimizerSection(),
            )  # fmt: skip
    finally:
        compute.close()
