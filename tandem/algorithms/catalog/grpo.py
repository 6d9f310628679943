"""Group-relative policy gradients: credit against the siblings of the same task, no critic.

Notation: r the ratio of new to old probability of a token, A the advantage, R the reward, o an answer of |o| tokens, G
the answers of a step, eps the clip. Formulas are what is minimised.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Default, Ratio

PPO_CLIP = "PPO's, arXiv:1707.06347, section 6.1; this paper names none"


GRPO = AlgorithmSpec(
    name="grpo",
    summary="advantage = (reward - group mean) / sample standard deviation; clipped token ratio; sequence mean",
    source="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, equations 3 and 4, section 4.1.2",
    formula="1/G sum_i 1/|o_i| sum_t [-min(r A, clip(r, 1 - eps, 1 + eps) A) + beta k3], A = (R - mean) / std",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.SEQUENCE_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    kl_weight=0.04,
    defaults=(
        Default(knob="clip_low", where=PPO_CLIP),
        Default(knob="clip_high", where=PPO_CLIP),
        Default(knob="kl_estimator", where="equation 4"),
        Default(knob="kl_weight", where="section 4.2"),
    ),
)

DR_GRPO = AlgorithmSpec(
    name="dr_grpo",
    summary="advantage = reward - group mean, no division by the deviation; sums over a constant length",
    source="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2: GRPO without 1/|o| "
    "and 1/std",
    formula="1/G sum_i 1/L sum_t -min(r A, clip(r, 1 - eps, 1 + eps) A), A = R - mean, L a constant",
    credit="tandem.algorithms.advantages:centred",
    aggregate=Aggregate.CONSTANT_LENGTH,
    clip_low=0.2,
    clip_high=0.2,
    length_cap=3000,
    defaults=(
        Default(knob="clip_low", where=PPO_CLIP),
        Default(knob="clip_high", where=PPO_CLIP),
        Default(knob="kl_weight", where="the authors' training command: beta 0"),
        Default(knob="length_cap", where="the authors' training command: the most tokens an answer may have there"),
    ),
)

DAPO = AlgorithmSpec(
    name="dapo",
    summary="grpo's advantage; wider clip above than below; token mean; groups without contrast do not count; "
    "over-long answers are punished softly",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476, equations 8 to 13",
    formula="1/(sum_i |o_i|) sum_i sum_t -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), A = (R - mean) / std, over "
    "groups with 0 < correct < group size; R + 0 up to cap - buffer tokens, -1 from cap on, linear between",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.28,
    drop_flat=True,
    overlong_cap=20480,
    overlong_buffer=4096,
    defaults=(
        Default(knob="clip_low", where="section 4.1"),
        Default(knob="clip_high", where="section 4.1"),
        Default(knob="overlong_cap", where="section 4.1: 16384 expected and 4096 more"),
        Default(knob="overlong_buffer", where="section 4.1"),
        Default(knob="kl_weight", where="section 2.3: none"),
    ),
)

GSPO = AlgorithmSpec(
    name="gspo",
    summary="grpo's advantage; one ratio for the whole sequence (geometric mean), clipped tightly; sequence mean",
    source="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 to 7",
    formula="1/G sum_i -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), s = exp(1/|o| sum_t log r), "
    "A = (R - mean) / std",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.SEQUENCE_MEAN,
    ratio=Ratio.SEQUENCE,
    clip_low=3e-4,
    clip_high=4e-4,
    defaults=(
        Default(knob="clip_low", where="section 5.1"),
        Default(knob="clip_high", where="section 5.1"),
        Default(knob="kl_weight", where="the objective, equation 5, has none"),
    ),
)

RLOO = AlgorithmSpec(
    name="rloo",
    summary="advantage = reward less the answer's KL, minus the mean of that of the other siblings; plain policy "
    "gradient of the whole answer, no ratio; mean over sequences of the sum over tokens",
    source="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 3.2",
    formula="1/G sum_i -(R_i - mean_{j != i} R_j) sum_t log pi(o_it), R_i = r_i - beta sum_t (log pi_old(o_it) - "
    "log pi_ref(o_it))",
    credit="tandem.algorithms.advantages:leave_one_out",
    aggregate=Aggregate.SEQUENCE_SUM,
    ratio=Ratio.NONE,
    kl_reward_weight=0.03,
    defaults=(Default(knob="kl_reward_weight", where="appendix C"),),
)

CISPO = AlgorithmSpec(
    name="cispo",
    summary="grpo's advantage; the ratio, clipped above only, is a constant weight of the log-probability, so that "
    "no token loses its gradient; token mean",
    source="MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5",
    formula="1/(sum_i |o_i|) sum_i sum_t -stop_gradient(clip(r, 0, 1 + eps_high)) A log pi, A = (R - mean) / std",
    credit="tandem.algorithms.advantages:standardised",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_high=4.0,
    clip_weight=True,
    defaults=(
        Default(
            knob="clip_high",
            where="the weight is at most 5: ScaleRL, Khatri et al. 2025, arXiv:2510.13786; this paper names none",
        ),
        Default(knob="clip_low", where="below equation 5: no lower bound"),
        Default(knob="kl_weight", where="below equation 5: none"),
    ),
)
