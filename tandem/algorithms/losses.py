"""Loss functions on packed loss tokens (shape suffix N: loss tokens of one micro-batch).

Owns: ratio, clip, KL estimates, cross-entropy. Refuses: models, packing, normalising (``shares`` arrive made).
Invariants: float32 inside whatever comes in; a token with share 0 adds exactly 0 to the loss and to every
gradient; finite inputs give a finite loss and gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.spec import AlgorithmSpec, Importance, Ratio
from tandem.core.errors import ConfigError

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
    old_N: Tensor | None = None  # under the weights that the step began with; None: the sampler's are those
    entropy_N: Tensor | None = None  # with gradient where the method has an entropy bonus


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """What a loss over pairs tells about itself."""

    margin_P: Tensor  # above 0: the better answer is preferred


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """``loss`` is the micro-batch's part of the step's loss; the rest is for the metrics, without gradient."""

    loss: Tensor
    ratio_N: Tensor
    clipped_N: Tensor  # bool: the clip holds the token's gradient back
    pairs: PairFacts | None = None


OwnLoss = Callable[[LossTokens], Tensor | TokenLosses]


def own_losses(function: OwnLoss, tokens: LossTokens) -> TokenLosses:
    """What a function of the user's own makes of loss tokens. It gives one loss a token (N), which is weighed here by
    the token's share of the step, so that its gradient depends on no micro-batching; or ``TokenLosses``, where it
    answers for that itself.

    Raises:
        ConfigError: it gave something else, or numbers that hang on no weight.
    """
    made = function(tokens)
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(made, Tensor):
        if made.shape != tokens.logprobs_N.shape:
            raise ConfigError(
                f"loss {name} gave a tensor of shape {tuple(made.shape)} for {len(tokens.logprobs_N)} tokens",
                hint="give one loss a token and no mean or sum: each is weighed by its share of the whole step",
            )
        loss = ((tokens.rl_shares_N + tokens.ce_shares_N) * made.float()).sum()
        log_ratio_N = tokens.logprobs_N.detach().float() - tokens.sampled_N.float()
        ratio_N = log_ratio_N.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
        made = TokenLosses(loss=loss, ratio_N=ratio_N, clipped_N=torch.zeros_like(ratio_N, dtype=torch.bool))
    if not isinstance(made, TokenLosses):
        raise ConfigError(f"loss {name} gave {type(made).__name__}", hint="a tensor with one loss a token")
    if not made.loss.requires_grad:
        raise ConfigError(f"loss {name} does not depend on logprobs_N: nothing would be learned",
                          hint="compute with tokens.logprobs_N itself, without detach() or item()")  # fmt: skip
    return made


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


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def importance_weights(
    spec: AlgorithmSpec, old_N: Tensor, sampled_N: Tensor, sequence_N: Tensor, num_sequences: int
) -> Tensor:
    """Probability under the step's first weights over that under the sampler's, bounded; a constant.

    Truncated: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training", min(w, cap).
    Masked: 0 outside of [1 / cap, cap] (IcePop, Ling team 2025). At the level of sequences w is the product over the
    policy's tokens of the sequence, the same for each of them.
    """
    log_N = (old_N.float() - sampled_N.float()).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    if spec.importance_level is Ratio.SEQUENCE:
        log_N = log_N.new_zeros(num_sequences).index_add(0, sequence_N, log_N)[sequence_N]
        log_N = log_N.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    weight_N = log_N.exp().detach()
    if spec.importance is Importance.TRUNCATED:
        return weight_N.clamp(max=spec.importance_cap)
    inside_N = (weight_N >= 1.0 / spec.importance_cap) & (weight_N <= spec.importance_cap)
    return torch.where(inside_N, weight_N, 0.0)


def _policy_losses(
    spec: AlgorithmSpec, tokens: LossTokens, logprobs_N: Tensor, ratio_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The policy-gradient loss of each token, and where a clip took hold."""
    nowhere_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
    advantages_N = tokens.advantages_N
    if spec.ratio is Ratio.NONE:
        return -logprobs_N * advantages_N, nowhere_N
    if spec.clip_weight:
        low, high = 1.0 - (1.0 if spec.clip_low is None else spec.clip_low), 1.0 + (spec.clip_high or 0.0)
        weight_N = ratio_N.detach().clamp(low, high)
        return -weight_N * advantages_N * logprobs_N, weight_N != ratio_N.detach()
    if spec.clip_low is None or spec.clip_high is None:
        return -ratio_N * advantages_N, nowhere_N
    return clipped(ratio_N, advantages_N, spec.clip_low, spec.clip_high, spec.clip_dual)


def token_losses(spec: AlgorithmSpec, tokens: LossTokens) -> TokenLosses:
    """The loss of every built-in method on tokens: policy gradient, KL penalty, entropy bonus, cross-entropy."""
    logprobs_N = tokens.logprobs_N.float()
    old_N = tokens.sampled_N if tokens.old_N is None else tokens.old_N
    ratio_N = ratios(spec.ratio, logprobs_N, old_N, tokens.sequence_N, tokens.num_sequences)
    policy_N, clipped_N = _policy_losses(spec, tokens, logprobs_N, ratio_N)
    if spec.importance is not Importance.NONE:
        if tokens.old_N is None:
            raise ValueError(f"{spec.name} weighs by importance, but the samples carry no old log-probabilities")
        policy_N = policy_N * importance_weights(
            spec, tokens.old_N, tokens.sampled_N, tokens.sequence_N, tokens.num_sequences
        )
    if spec.kl_weight > 0:
        if tokens.reference_N is None:
            raise ValueError(f"{spec.name} has a KL penalty, but the samples carry no reference log-probabilities")
        policy_N = policy_N + spec.kl_weight * KL[spec.kl_estimator](logprobs_N, tokens.reference_N)
    if spec.entropy_weight > 0:
        if tokens.entropy_N is None:
            raise ValueError(f"{spec.name} has an entropy bonus, but was given no entropies")
        policy_N = policy_N - spec.entropy_weight * tokens.entropy_N
    loss = (tokens.rl_shares_N * policy_N).sum() - (tokens.ce_shares_N * logprobs_N).sum()
    return TokenLosses(loss=loss, ratio_N=ratio_N.detach(), clipped_N=clipped_N)


def imbalance(chances_NX: Tensor, chosen_NK: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """How unevenly one layer's experts are used, summed over the sequences; 1 each where all are used alike.

    For a sequence: X sum_x f_x P_x, where f_x is the share of its tokens' choices that fell on expert x and P_x the
    mean of the router's probability for it (Fedus et al. 2021, arXiv:2101.03961, equation 4; for each sequence by
    itself as in DeepSeek-V3, arXiv:2412.19437, equations 17 to 20: nothing depends on what else is in the batch).
    Only P has a gradient. A sequence without tokens adds 0.
    """
    num_experts, per_token = chances_NX.shape[1], chosen_NK.shape[1]
    counts_B = torch.bincount(sequence_N, minlength=num_sequences).clamp(min=1)[:, None]
    chosen_NX = torch.zeros_like(chances_NX).scatter_(1, chosen_NK, 1.0 / per_token)
    empty_BX = chances_NX.new_zeros(num_sequences, num_experts)
    shares_BX = empty_BX.index_add(0, sequence_N, chosen_NX) / counts_B
    means_BX = empty_BX.index_add(0, sequence_N, chances_NX) / counts_B
    return num_experts * (shares_BX * means_BX).sum()
