"""Worked values W6 and W7, and the whole loss against a transcription in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.algorithms.catalog.grpo import DAPO, DR_GRPO, GSPO, RLOO
from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.losses import LossTokens, clipped, kl_k1, kl_k2, kl_k3, own_losses, ratios, token_losses
from tandem.algorithms.spec import Ratio
from tandem.core.errors import ConfigError


def test_w6_estimators() -> None:
    policy = torch.tensor(-1.0)
    for reference, expected in ((-1.5, (0.5, 0.125, 0.106531)), (-0.5, (-0.5, 0.125, 0.148721))):
        got = [float(f(policy, torch.tensor(reference))) for f in (kl_k1, kl_k2, kl_k3)]
        assert got == pytest.approx(expected, abs=1e-6)


def test_w6_expectations_and_gradients() -> None:
    reference = torch.tensor([0.25, 0.75]).log()
    logits = torch.zeros(2, requires_grad=True)
    weights = torch.tensor([0.5, 0.5])

    def averaged(estimator) -> torch.Tensor:
        return (weights * estimator(logits.log_softmax(0), reference)).sum()

    assert float(averaged(kl_k3).detach()) == pytest.approx(0.143841, abs=1e-6)
    assert float(averaged(kl_k2).detach()) == pytest.approx(0.161214, abs=1e-6)
    for estimator, gradient in ((kl_k1, 0.0), (kl_k2, 0.274653), (kl_k3, 0.25)):
        (grad,) = torch.autograd.grad(averaged(estimator), logits)
        assert float(grad[0]) == pytest.approx(gradient, abs=1e-6)
    log_p = logits.log_softmax(0)
    (true,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits)
    assert float(true[0]) == pytest.approx(0.274653, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("policy", "reference", "value"), [(-1.0, -120.0, 118.0), (-120.0, -1.0, math.exp(20) - 120)])
def test_w6_far_apart_stays_finite(dtype, policy, reference, value) -> None:
    policy_logprob = torch.tensor(policy, dtype=dtype, requires_grad=True)
    loss = kl_k3(policy_logprob, torch.tensor(reference, dtype=dtype))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(value, rel=1e-3)
    assert policy_logprob.grad is not None and torch.isfinite(policy_logprob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(1.349859, 1.0, -1.2, 0.0), (1.349859, -1.0, 1.349859, 1.0), (0.7, 1.0, -0.7, -1.0), (0.7, -1.0, 0.8, 0.0)],
)
def test_w7_clip(ratio, advantage, loss, gradient) -> None:
    value = torch.tensor([ratio], requires_grad=True)
    got, held = clipped(value, torch.tensor([advantage]), 0.2, 0.2)
    got.sum().backward()
    assert float(got.detach()) == pytest.approx(loss, abs=1e-6)
    assert value.grad is not None and float(value.grad) == pytest.approx(gradient, abs=1e-6)
    assert bool(held) is (gradient == 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(2.9, -1.0, 2.9, 1.0), (15.0, -2.0, 6.0, 0.0), (15.0, 2.0, -2.4, 0.0), (0.7, -1.0, 0.8, 0.0)],
)
def test_dual_clip_bounds_only_the_negative_side(ratio, advantage, loss, gradient) -> None:
    value = torch.tensor([ratio], requires_grad=True)
    got, held = clipped(value, torch.tensor([advantage]), 0.2, 0.2, 3.0)
    got.sum().backward()
    assert float(got.detach()) == pytest.approx(loss, abs=1e-6)
    assert value.grad is not None and float(value.grad) == pytest.approx(gradient, abs=1e-6)
    assert bool(held) is (gradient == 0.0)


def test_w7_clip_fraction_and_sequence_ratio() -> None:
    ratio = torch.tensor([1.349859, 1.349859, 0.7, 0.7])
    _, held = clipped(ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2, 0.2)
    assert float(held.float().mean()) == 0.5
    changes = torch.tensor([0.2, -0.1, 0.05, 1.0])
    got = ratios(Ratio.SEQUENCE, changes, torch.zeros(4), torch.tensor([0, 0, 0, 1]), 2)
    assert got.tolist() == pytest.approx([1.051271] * 3 + [math.e], abs=1e-6)


DUAL = dataclasses.replace(GRPO, name="grpo, dual clip", clip_dual=3.0)


def loss_tokens(seed: int = 0, *, reference: bool = False, spread: float = 0.4) -> LossTokens:
    rng = np.random.default_rng(seed)
    sequence = np.array([0] * 3 + [1] * 5 + [2] * 4)
    draw = lambda scale, shift: torch.tensor(rng.normal(shift, scale, 12), dtype=torch.float32)  # noqa: E731
    return LossTokens(
        logprobs_N=draw(spread, -2.0).requires_grad_(),
        sampled_N=draw(spread, -2.0),
        reference_N=draw(spread, -2.0) if reference else None,
        advantages_N=draw(1.0, 0.0),
        rl_shares_N=torch.tensor(rng.choice([0.0, 0.05, 0.1], 12), dtype=torch.float32),
        ce_shares_N=torch.tensor(rng.choice([0.0, 0.2], 12), dtype=torch.float32),
        sequence_N=torch.tensor(sequence),
        num_sequences=3,
    )


def transcription(spec, tokens: LossTokens) -> float:
    """The same loss, one token at a time in float64."""
    stream = {
        name: None if getattr(tokens, name) is None else getattr(tokens, name).detach().double().tolist()
        for name in ("logprobs_N", "sampled_N", "reference_N", "advantages_N", "rl_shares_N", "ce_shares_N")
    }
    sequence = tokens.sequence_N.tolist()
    change = [new - old for new, old in zip(stream["logprobs_N"], stream["sampled_N"], strict=True)]
    total = 0.0
    for t in range(len(sequence)):
        siblings = [change[u] for u in range(len(sequence)) if sequence[u] == sequence[t]]
        ratio = math.exp(sum(siblings) / len(siblings) if spec.ratio is Ratio.SEQUENCE else change[t])
        a = stream["advantages_N"][t]
        if spec.ratio is Ratio.NONE:
            loss = -stream["logprobs_N"][t] * a
        else:
            loss = max(-ratio * a, -min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high) * a)
            if a < 0 and spec.clip_dual is not None:
                loss = min(loss, -spec.clip_dual * a)
        if spec.kl_weight:
            d = stream["reference_N"][t] - stream["logprobs_N"][t]
            loss += spec.kl_weight * (math.exp(d) - 1 - d)
        total += stream["rl_shares_N"][t] * loss - stream["ce_shares_N"][t] * stream["logprobs_N"][t]
    return total


@pytest.mark.parametrize("spec", [GRPO, DUAL, DR_GRPO, DAPO, GSPO, RLOO, SFT], ids=lambda spec: spec.name)
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_loss_equals_its_transcription(spec, kl_weight) -> None:
    spec = dataclasses.replace(spec, kl_weight=kl_weight)
    for seed in range(5):
        tokens = loss_tokens(seed, reference=kl_weight > 0)
        assert float(token_losses(spec, tokens).loss.detach()) == pytest.approx(transcription(spec, tokens), abs=1e-6)


def test_tokens_without_share_have_no_gradient_even_when_far_off() -> None:
    tokens = loss_tokens(reference=True)
    far = tokens.sampled_N.clone()
    far[(tokens.rl_shares_N == 0)] = -1e4
    tokens = dataclasses.replace(tokens, sampled_N=far, ce_shares_N=torch.zeros(12))
    token_losses(dataclasses.replace(GRPO, kl_weight=0.1), tokens).loss.backward()
    grad = tokens.logprobs_N.grad
    assert grad is not None and torch.isfinite(grad).all()
    assert torch.equal(grad[tokens.rl_shares_N == 0], torch.zeros(int((tokens.rl_shares_N == 0).sum())))


def test_on_policy_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    tokens = loss_tokens()
    tokens = dataclasses.replace(tokens, sampled_N=tokens.logprobs_N.detach().clone(), ce_shares_N=torch.zeros(12))
    losses = token_losses(GRPO, tokens)
    losses.loss.backward()
    assert torch.equal(losses.ratio_N, torch.ones(12)) and not losses.clipped_N.any()
    assert torch.allclose(tokens.logprobs_N.grad, -tokens.rl_shares_N * tokens.advantages_N)


def test_a_penalty_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        token_losses(dataclasses.replace(GRPO, kl_weight=0.1), loss_tokens())


def test_what_is_no_loss_of_tokens_is_refused() -> None:
    shares = torch.full((3,), 0.5)
    tokens = LossTokens(
        logprobs_N=torch.zeros(3, requires_grad=True), sampled_N=torch.zeros(3), reference_N=None,
        advantages_N=torch.ones(3), rl_shares_N=shares, ce_shares_N=torch.zeros(3),
        sequence_N=torch.zeros(3, dtype=torch.int64), num_sequences=1,
    )  # fmt: skip
    made = own_losses(lambda tokens: -tokens.logprobs_N + 1.0, tokens)
    assert float(made.loss.detach()) == 1.5 and made.ratio_N.tolist() == [1.0] * 3
    assert float(own_losses(lambda tokens: token_losses(GRPO, tokens), tokens).loss.detach()) == -1.5
    for function, why in (
        (lambda tokens: tokens.logprobs_N.sum(), "shape"),
        (lambda tokens: tokens.logprobs_N.detach(), "does not depend"),
        (lambda tokens: 1.0, "gave float"),
    ):
        with pytest.raises(ConfigError, match=why):
            own_losses(function, tokens)
