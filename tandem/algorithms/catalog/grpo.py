"""Group-relative policy gradients: credit against the siblings of the same task, no critic.

Notation: r the ratio of new to old probability, A the advantage, eps the clip. All defaults are the papers', with
two departures that hold for the whole family: no KL penalty until ``kl_weight`` is set (GRPO's paper has 0.04),
and the dual clip of 3 (arXiv:1912.09729), which bounds what one token of old data may do.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Ratio

GRPO = AlgorithmSpec(
    name="grpo",
    summary="advantage = (reward - group mean) / sample standard deviation; clipped token ratio; sequence mean",
    source="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, equation 3: mean over sequences of "
    "1/|o| sum_t min(r A, clip(r, 1 - eps, 1 + eps) A) - beta k3",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.SEQUENCE_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
)

DR_GRPO = AlgorithmSpec(
    name="dr_grpo",
    summary="advantage = reward - group mean, no division by the deviation; sums over a constant length",
    source="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783: GRPO without 1/|o| and 1/std",
    credit="tandem.algorithms.advantages:centred",
    aggregate=Aggregate.CONSTANT_LENGTH,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    length_cap=256,
)

DAPO = AlgorithmSpec(
    name="dapo",
    summary="grpo's advantage; wider clip above than below; token mean; groups without contrast do not count; "
    "over-long answers are punished softly",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476, equations 8 to 13: clip(r, 1 - 0.2, 1 + 0.28), mean over tokens, "
    "0 < correct < group size, length reward with cap 20480 and buffer 4096",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.28,
    clip_dual=3.0,
    drop_flat=True,
    overlong_cap=20480,
    overlong_buffer=4096,
)

GSPO = AlgorithmSpec(
    name="gspo",
    summary="grpo's advantage; one ratio for the whole sequence (geometric mean), clipped tightly; sequence mean",
    source="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, equation 5: "
    "s = exp(mean_t log r_t), mean over sequences of min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)",
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
    source="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, equation 7: "
    "mean over siblings of (R_i - mean_{j != i} R_j) grad log pi(y_i)",
    credit="tandem.algorithms.advantages:leave_one_out",
    aggregate=Aggregate.SEQUENCE_MEAN,
    ratio=Ratio.NONE,
)

CISPO = AlgorithmSpec(
    name="cispo",
    summary="grpo's advantage; the ratio, clipped above only, is a constant weight of the log-probability, so that "
    "no token loses its gradient; token mean",
    source="MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5: mean over tokens of "
    "stop_gradient(clip(r, 0, 1 + eps_high)) A log pi; the paper gives no number for eps_high",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_high=4.0,
    clip_weight=True,
)
