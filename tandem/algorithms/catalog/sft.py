"""Supervised learning on demonstrations."""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Data, Ratio

SFT = AlgorithmSpec(
    name="sft",
    summary="cross-entropy of the demonstrated tokens; token mean",
    source="maximum likelihood, as in Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, section 3.5; it has no knobs",
    formula="1/(all demonstrated tokens of the step) sum -log pi(token)",
    credit=None,
    data=Data.DEMONSTRATIONS,
    aggregate=Aggregate.TOKEN_MEAN,
    ratio=Ratio.NONE,
)
