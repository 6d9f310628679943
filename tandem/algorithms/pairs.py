"""Losses over pairs: sequences 2i (the better one) and 2i + 1 (the worse one) of a micro-batch.

Owns: DPO, cDPO, IPO and Bradley-Terry. Refuses: models; splitting a pair over micro-batches (the plan's part).
Invariants: float32 inside; the loss of a pair counts with the share of its tokens, all alike, so that it
does not depend on the micro-batch; both answers of a pair must have a token to learn from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.algorithms.losses import LossTokens, PairFacts, TokenLosses
from tandem.algorithms.spec import AlgorithmSpec


def logistic(margin_P: Tensor, smoothing: float) -> Tensor:
    """-(1 - e) log sigma(margin) - e log sigma(-margin)."""
    return -(1.0 - smoothing) * F.logsigmoid(margin_P) - smoothing * F.logsigmoid(-margin_P)


def log_ratio_sums(spec: AlgorithmSpec, tokens: LossTokens) -> Tensor:
    """Sum over each sequence of log policy - log reference."""
    if tokens.reference_N is None:
        raise ValueError(f"{spec.name} compares with a reference, but the samples carry no such log-probabilities")
    change_N = tokens.logprobs_N.float() - tokens.reference_N.float()
    return change_N.new_zeros(tokens.num_sequences).index_add(0, tokens.sequence_N, change_N)


def preference_loss(spec: AlgorithmSpec, tokens: LossTokens) -> TokenLosses:
    """DPO (arXiv:2305.18290, equation 7), with ``label_smoothing`` cDPO."""
    margin_P = _margins(log_ratio_sums(spec, tokens))
    return _result(tokens, logistic(spec.beta * margin_P, spec.label_smoothing), spec.beta * margin_P)


def squared_preference_loss(spec: AlgorithmSpec, tokens: LossTokens) -> TokenLosses:
    """IPO (arXiv:2310.12036, equation 17): the margin itself is drawn to 1 / (2 tau)."""
    margin_P = _margins(log_ratio_sums(spec, tokens))
    return _result(tokens, (margin_P - 1.0 / (2.0 * spec.beta)).square(), margin_P)


def bradley_terry(scores_B: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Loss and margin of each pair of scores (better, worse, better, worse, ...)."""
    margin_P = _margins(scores_B.float())
    return logistic(margin_P, smoothing), margin_P


def _margins(values_B: Tensor) -> Tensor:
    return values_B[0::2] - values_B[1::2]


def _result(tokens: LossTokens, loss_P: Tensor, margin_P: Tensor) -> TokenLosses:
    zeros_B = tokens.rl_shares_N.new_zeros(tokens.num_sequences)
    share_B = zeros_B.scatter_reduce(0, tokens.sequence_N, tokens.rl_shares_N, "amax")
    ones_N = torch.ones_like(tokens.rl_shares_N)
    return TokenLosses(
        loss=(share_B[0::2] * loss_P).sum(),
        ratio_N=ones_N,
        clipped_N=torch.zeros_like(ones_N, dtype=torch.bool),
        pairs=PairFacts(margin_P=margin_P.detach()),
    )
