"""Group-relative policy gradients: credit against the siblings of the same task, no critic."""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Ratio

GRPO = AlgorithmSpec(
    name="grpo",
    summary="advantage = (reward - group mean) / sample standard deviation; clipped token ratio; sequence mean",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.SEQUENCE_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
)

DR_GRPO = AlgorithmSpec(
    name="dr_grpo",
    summary="advantage = reward - group mean, no division by the deviation; sums over a constant length",
    credit="tandem.algorithms.advantages:centred",
    aggregate=Aggregate.CONSTANT_LENGTH,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    length_cap=256,
)

DAPO = AlgorithmSpec(
    name="dapo",
    summary="grpo's advantage; wider clip above than below; token mean; groups without contrast do not count",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.28,
    clip_dual=3.0,
    drop_flat=True,
)

GSPO = AlgorithmSpec(
    name="gspo",
    summary="grpo's advantage; one ratio for the whole sequence (geometric mean), clipped tightly; sequence mean",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.SEQUENCE_MEAN,
    ratio=Ratio.SEQUENCE,
    clip_low=3e-4,
    clip_high=4e-4,
    clip_dual=3.0,
)

RLOO = AlgorithmSpec(
    name="rloo",
    summary="advantage = reward - mean reward of the other siblings; plain policy gradient, no ratio; sequence mean",
    credit="tandem.algorithms.advantages:leave_one_out",
    aggregate=Aggregate.SEQUENCE_MEAN,
    ratio=Ratio.NONE,
)
