"""What a step tells about itself, summed on the device and read once.

Invariants: a metric without a token to measure is absent, never 0; nothing here changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.losses import TokenLosses, kl_k1, kl_k3
from tandem.core.routes import MISSING
from tandem.engine.train.batch import MicroBatch
from tandem.models.routes import RouteReplay, Settles

_BAND = math.log(2.0)  # a ratio of sampler and trainer outside 1/2 to 2: where the default importance cap begins
_MAXIMA = 2  # how many of the last numbers are maxima: -1 where there is nothing to measure


class _Measured(NamedTuple):
    """Sums over a micro-batch, and behind them ``_MAXIMA`` maxima; *tokens* are loss tokens."""

    loss: Tensor
    rl_tokens: Tensor  # that the policy learns from
    k1: Tensor  # KL of the sampler from the trainer, over tokens that the sampler drew
    k3: Tensor
    ratio: Tensor
    clipped: Tensor
    entropy: Tensor
    ce_tokens: Tensor  # of demonstrations
    ce_loss: Tensor
    reference_tokens: Tensor
    reference_kl: Tensor
    rows: Tensor  # computed
    pairs: Tensor
    pairs_right: Tensor
    margin: Tensor
    gap: Tensor  # of log-probabilities, sampler to trainer, where both have the same weights
    gap_tokens: Tensor
    gap_outside: Tensor
    routes: Tensor
    routes_differing: Tensor
    routes_missing: Tensor
    imbalance: Tensor
    balanced: Tensor
    gap_max: Tensor
    ratio_max: Tensor


@torch.no_grad()
def measure(
    batch: MicroBatch,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    losses: TokenLosses,
    routes: Settles | None = None,
    imbalance: Tensor | None = None,
) -> Tensor:
    """The numbers of ``_Measured`` of one micro-batch, float64, still on the device."""
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
    gap_N = torch.where(rl_N & batch.current_N, (logprobs - batch.sampled_N).abs(), -1.0)
    ratio_N = torch.where(rl_N, losses.ratio_N, -1.0)
    differing, routed, absent = _replayed(routes, losses.loss)
    found = _Measured(
        loss=losses.loss.detach(),
        rl_tokens=rl.sum(),
        k1=(rl * kl_k1(batch.sampled_N, logprobs)).sum(),
        k3=(rl * kl_k3(batch.sampled_N, logprobs)).sum(),
        ratio=(rl * losses.ratio_N).sum(),
        clipped=(rl * losses.clipped_N).sum(),
        entropy=(rl * entropy_N.detach()).sum(),
        ce_tokens=ce.sum(),
        ce_loss=-(ce * logprobs).sum(),
        reference_tokens=referenced.sum(),
        reference_kl=(referenced * reference_kl).sum(),
        rows=torch.full_like(losses.loss, batch.layout.ids_T.numel(), dtype=torch.float64),
        pairs=torch.full_like(losses.loss, margin_P.numel(), dtype=torch.float64),
        pairs_right=(margin_P > 0).sum(),
        margin=margin_P.double().sum(),
        gap=gap_N.clamp(min=0).double().sum(),
        gap_tokens=(gap_N >= 0).sum(),
        gap_outside=(gap_N > _BAND).sum(),
        routes=routed,
        routes_differing=differing,
        routes_missing=absent,
        imbalance=nothing.sum() if imbalance is None else imbalance.detach(),
        balanced=torch.full_like(losses.loss, float(imbalance is not None)),
        gap_max=gap_N.max(),
        ratio_max=ratio_N.max(),
    )
    return torch.stack([each.double() for each in found])


def _replayed(routes: Settles | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens times layers: those whose router would choose other experts than were recorded, those with recorded
    ones, and those without."""
    if not isinstance(routes, RouteReplay) or routes.given_TR is None or not routes.others:
        none = torch.zeros_like(like)
        return none, none, none
    others = torch.stack(list(routes.others.values()))
    absent = (routes.given_TR[:, 0] == MISSING).sum() * len(others)
    return others.sum(), others.numel() - absent, absent


def conclude(measured: Sequence[Tensor]) -> tuple[float, int, dict[str, float]]:
    """Loss of the step, tokens computed, and its metrics, from all micro-batches: the one read from the device."""
    if not measured:
        return 0.0, 0, {}
    stacked = torch.stack(list(measured))
    numbers = [*stacked[:, :-_MAXIMA].sum(0).tolist(), *stacked[:, -_MAXIMA:].amax(0).tolist()]
    total = dict(zip(_Measured._fields, numbers, strict=True))
    metrics: dict[str, float] = {}
    if count := total["rl_tokens"]:
        metrics |= {
            "kl_sampler_k1": total["k1"] / count,
            "kl_sampler_k3": total["k3"] / count,
            "ratio_mean": total["ratio"] / count,
            "ratio_max": total["ratio_max"],
            "clip_fraction": total["clipped"] / count,
            "entropy": total["entropy"] / count,
        }
        if total["gap_max"] >= 0:
            metrics["logprob_gap_max"] = total["gap_max"]
            metrics["logprob_gap_mean"] = total["gap"] / total["gap_tokens"]
            metrics["logprob_gap_outside"] = total["gap_outside"] / total["gap_tokens"]
    if total["ce_tokens"]:
        metrics["ce_loss"] = total["ce_loss"] / total["ce_tokens"]
    if total["pairs"]:
        metrics |= {
            "pair_accuracy": total["pairs_right"] / total["pairs"],
            "pair_margin": total["margin"] / total["pairs"],
        }
    if total["reference_tokens"]:
        metrics["kl_reference"] = total["reference_kl"] / total["reference_tokens"]
    if total["balanced"]:
        metrics["imbalance"] = total["imbalance"]
    if total["routes"] + total["routes_missing"]:
        metrics["routes_missing"] = total["routes_missing"] / (total["routes"] + total["routes_missing"])
    if total["routes"]:
        metrics["routes_differing"] = total["routes_differing"] / total["routes"]
    return total["loss"], int(total["rows"]), metrics
