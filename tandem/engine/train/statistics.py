"""What a step tells about itself, summed on the device and read once.

Invariants: a metric without a token to measure is absent, never 0; nothing here changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.algorithms.losses import TokenLosses, kl_k1, kl_k3
from tandem.engine.train.batch import MicroBatch

_SUMS = (
    "loss",
    "rl_tokens",
    "k1",
    "k3",
    "ratio",
    "clipped",
    "entropy",
    "ce_tokens",
    "ce_loss",
    "reference_tokens",
    "reference_kl",
    "rows",
    "pairs",
    "pairs_right",
    "margin",
)
_MAXIMA = ("gap", "ratio_max")  # -1 where there is nothing to measure


@torch.no_grad()
def measure(batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, losses: TokenLosses) -> Tensor:
    """Sums and maxima of one micro-batch, in the order of the names above, float64, still on the device."""
    rl_N, ce_N = batch.rl_shares_N != 0, batch.ce_shares_N != 0
    pairs = losses.pairs
    if pairs is not None:  # nobody sampled these tokens
        rl_N = torch.zeros_like(rl_N)
    margin_P = logprobs_N.new_zeros(0) if pairs is None else pairs.margin_P
    rl, ce = rl_N.double(), ce_N.double()
    logprobs = logprobs_N.detach()
    nothing = torch.zeros_like(rl)
    referenced = nothing if batch.reference_N is None else rl
    reference_kl = nothing if batch.reference_N is None else kl_k3(logprobs, batch.reference_N)
    sums = [
        losses.loss.detach().double(),
        rl.sum(),
        # KL of the sampler from the trainer, over tokens that the sampler drew.
        (rl * kl_k1(batch.sampled_N, logprobs)).sum(),
        (rl * kl_k3(batch.sampled_N, logprobs)).sum(),
        (rl * losses.ratio_N).sum(),
        (rl * losses.clipped_N).sum(),
        (rl * entropy_N.detach()).sum(),
        ce.sum(),
        -(ce * logprobs).sum(),
        referenced.sum(),
        (referenced * reference_kl).sum(),
        torch.full_like(losses.loss, batch.layout.ids_T.numel(), dtype=torch.float64),
        torch.full_like(losses.loss, margin_P.numel(), dtype=torch.float64),
        (margin_P > 0).double().sum(),
        margin_P.double().sum(),
    ]
    gap_N = torch.where(rl_N & batch.current_N, (logprobs - batch.sampled_N).abs(), -1.0)
    ratio_N = torch.where(rl_N, losses.ratio_N, -1.0)
    return torch.stack([*sums, gap_N.max().double(), ratio_N.max().double()])


def conclude(measured: Sequence[Tensor]) -> tuple[float, int, dict[str, float]]:
    """Loss of the step, tokens computed, and its metrics, from all micro-batches: the one read from the device."""
    if not measured:
        return 0.0, 0, {}
    stacked = torch.stack(list(measured))
    total = dict(zip(_SUMS, stacked[:, : len(_SUMS)].sum(0).tolist(), strict=True))
    peak = dict(zip(_MAXIMA, stacked[:, len(_SUMS) :].amax(0).tolist(), strict=True))
    metrics: dict[str, float] = {}
    if count := total["rl_tokens"]:
        metrics |= {
            "kl_sampler_k1": total["k1"] / count,
            "kl_sampler_k3": total["k3"] / count,
            "ratio_mean": total["ratio"] / count,
            "ratio_max": peak["ratio_max"],
            "clip_fraction": total["clipped"] / count,
            "entropy": total["entropy"] / count,
        }
        if peak["gap"] >= 0:
            metrics["logprob_gap_max"] = peak["gap"]
    if total["ce_tokens"]:
        metrics["ce_loss"] = total["ce_loss"] / total["ce_tokens"]
    if total["pairs"]:
        metrics |= {
            "pair_accuracy": total["pairs_right"] / total["pairs"],
            "pair_margin": total["margin"] / total["pairs"],
        }
    if total["reference_tokens"]:
        metrics["kl_reference"] = total["reference_kl"] / total["reference_tokens"]
    return total["loss"], int(total["rows"]), metrics
