"""Supervised learning on demonstrations."""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Data, Ratio

SFT = AlgorithmSpec(
    name="sft",
    summary="cross-entropy of the demonstrated tokens; token mean",
    source="maximum likelihood: mean over tokens of -log pi(token)",
    credit=None,
    data=Data.DEMONSTRATIONS,
    aggregate=Aggregate.TOKEN_MEAN,
    ratio=Ratio.NONE,
)
