"""Supervised learning on demonstrations."""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Ratio

SFT = AlgorithmSpec(
    name="sft",
    summary="cross-entropy of the demonstrated tokens; token mean",
    credit=None,
    aggregate=Aggregate.TOKEN_MEAN,
    ratio=Ratio.NONE,
)
