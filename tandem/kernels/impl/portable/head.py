"""Rows of logits: log-probabilities, and draws from them, with the faces of ``impl.cpu.head``.

Invariant: whatever is asked about a row, its log-probabilities have the same bits, and they and the token depend on
that row alone: sums are folded, and a draw walks down a pyramid of sums instead of along a running one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels.impl.portable.sums import folded_sum, pyramid


def row_logprobs(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """All log-probabilities, float32 ``[T, V]``."""
    scaled = logits_TV.float() / temperature_T[:, None]
    scaled = scaled - scaled.amax(1, keepdim=True)
    return scaled - folded_sum(scaled.exp()).log()


def target_logprobs(logits_TV: Tensor, temperature_T: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and the row's entropy, both float32 ``[T]``."""
    logp_TV = row_logprobs(logits_TV, temperature_T)
    p_TV = logp_TV.exp()
    parts_TV = torch.where(p_TV > 0, p_TV * logp_TV, 0.0)
    return logp_TV.gather(1, targets_T[:, None])[:, 0], -folded_sum(parts_TV)[:, 0]


def draw(logits_TV: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row (int64) and its log-probability: where the sum of the probabilities before it comes to
    ``uniform`` (float64); the likeliest, the first of equal ones, where that is negative.

    Raises:
        EngineError: a row has no finite distribution.
    """
    logp_TV = row_logprobs(logits_TV, temperature_T)
    levels = pyramid(logp_TV.exp().double())  # so that small probabilities count
    total_T1 = levels[-1]
    broken = int((~(torch.isfinite(total_T1) & (total_T1 > 0))).sum())
    if broken:
        raise EngineError(
            f"{broken} of {logits_TV.shape[0]} rows of logits have no finite distribution",
            hint="the weights or the temperature are not finite, or a mask left no token",
        )
    aim_T1 = uniform_T[:, None].clamp(min=0) * total_T1
    place_T1 = torch.zeros_like(total_T1, dtype=torch.int64)
    for level in reversed(levels[:-1]):
        left_T1, right_T1 = level.gather(1, 2 * place_T1), level.gather(1, 2 * place_T1 + 1)
        goes_right = (aim_T1 >= left_T1) & (right_T1 > 0)  # never to what has no probability
        aim_T1 = torch.where(goes_right, aim_T1 - left_T1, aim_T1)
        place_T1 = 2 * place_T1 + goes_right
    numbers_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    likeliest = logits_TV == logits_TV.amax(1, keepdim=True)
    first_T1 = torch.where(likeliest, numbers_V, logits_TV.shape[1]).amin(1, keepdim=True)
    tokens_T1 = torch.where(uniform_T[:, None] < 0, first_T1, place_T1)
    return tokens_T1[:, 0], logp_TV.gather(1, tokens_T1)[:, 0]
