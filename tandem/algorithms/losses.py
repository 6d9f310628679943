"""Loss functions on packed loss tokens (shape suffix N: loss tokens of one micro-batch).

Owns: ratio, clip, KL estimates, cross-entropy. Refuses: models, packing, normalising (``shares`` arrive made).
Invariants: float32 inside whatever comes in; a token with share 0 adds exactly 0 to the loss and to every
gradient; finite inputs give a finite loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.spec import AlgorithmSpec, Ratio

# exp() of a log-ratio stops growing here (e^20 = 4.9e8, far outside any clip range), so that a token both
# policies disagree about completely cannot make the loss of the whole step infinite.
LOG_RATIO_CAP = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """Everything a loss may look at. ``rl_shares`` and ``ce_shares`` are token share x sample weight;
    ``sequence`` numbers the samples of the micro-batch, each of which is wholly inside it."""

    logprobs_N: Tensor  # under the weights in training, with gradient
    sampled_N: Tensor  # under the sampler's weights
    reference_N: Tensor | None
    advantages_N: Tensor
    rl_shares_N: Tensor
    ce_shares_N: Tensor
    sequence_N: Tensor  # int64
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """``loss`` is the micro-batch's part of the step's loss; the rest is for the metrics, without gradient."""

    loss: Tensor
    ratio_N: Tensor
    clipped_N: Tensor  # bool: the clip holds the token's gradient back


def ratios(kind: Ratio, logprobs_N: Tensor, sampled_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Probability of the sampled tokens under the new policy over that under the sampler's."""
    log_ratio_N = (logprobs_N.float() - sampled_N.float()).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    if kind is Ratio.SEQUENCE:
        counts_B = torch.bincount(sequence_N, minlength=num_sequences).clamp(min=1)
        sums_B = log_ratio_N.new_zeros(num_sequences).index_add(0, sequence_N, log_ratio_N)
        log_ratio_N = (sums_B / counts_B)[sequence_N]
    return log_ratio_N.exp()


def clipped(
    ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """The pessimistic one of the plain and the clipped objective, as a loss; and where the clip took hold.

    The pessimistic one has no bound where the advantage is negative and the ratio large: one such token of old
    data can outweigh all others of its step. ``dual`` (over 1) holds those at ``dual`` times the advantage
    (dual-clip PPO, Ye et al. 2020, arXiv:1912.09729, equation 3).
    """
    plain_N = -ratio_N * advantages_N
    held_N = -ratio_N.clamp(1.0 - low, 1.0 + high) * advantages_N
    clipped_N = held_N > plain_N
    if dual is not None:
        beyond_N = (advantages_N < 0) & (ratio_N > dual)
        held_N = torch.where(beyond_N, -dual * advantages_N, held_N)
        clipped_N = clipped_N | beyond_N
    return torch.where(clipped_N, held_N, plain_N), clipped_N.detach()


def kl_k1(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """Log-ratio: unbiased, may be negative, and its gradient averages to 0 on-policy."""
    return policy_N.float() - reference_N.float()


def kl_k2(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """Half the squared log-ratio: biased value, right gradient on-policy."""
    return 0.5 * (policy_N.float() - reference_N.float()).square()


def kl_k3(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = reference - policy: unbiased and never negative."""
    difference_N = reference_N.float() - policy_N.float()
    return difference_N.clamp(max=LOG_RATIO_CAP).expm1() - difference_N


def token_losses(spec: AlgorithmSpec, tokens: LossTokens) -> TokenLosses:
    """The loss of every built-in method: clipped or plain policy gradient, KL penalty, cross-entropy."""
    logprobs_N = tokens.logprobs_N.float()
    clipped_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
    ratio_N = ratios(spec.ratio, logprobs_N, tokens.sampled_N, tokens.sequence_N, tokens.num_sequences)
    if spec.ratio is Ratio.NONE:
        policy_N = -logprobs_N * tokens.advantages_N
    elif spec.clip_low is None or spec.clip_high is None:
        policy_N = -ratio_N * tokens.advantages_N
    else:
        policy_N, clipped_N = clipped(
            ratio_N, tokens.advantages_N, spec.clip_low, spec.clip_high, spec.clip_dual
        )
    if spec.kl_weight > 0:
        if tokens.reference_N is None:
            raise ValueError(f"{spec.name} has a KL penalty, but the samples carry no reference log-probabilities")
        policy_N = policy_N + spec.kl_weight * kl_k3(logprobs_N, tokens.reference_N)
    loss = (tokens.rl_shares_N * policy_N).sum() - (tokens.ce_shares_N * logprobs_N).sum()
    return TokenLosses(loss=loss, ratio_N=ratio_N.detach(), clipped_N=clipped_N)
