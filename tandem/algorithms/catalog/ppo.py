"""Proximal policy optimisation with a critic.

Advantages by GAE over the policy's own tokens. The critic is trained beside, on the returns; its value loss is
``engine.train.value:value_losses``, its knobs are those of ``[critic]``.
"""

from __future__ import annotations

from tandem.algorithms.catalog.grpo import DUAL_CLIP
from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Default

PPO = AlgorithmSpec(
    name="ppo",
    summary="advantage by GAE from a critic's values; clipped token ratio; token mean",
    source="Schulman et al. 2017, arXiv:1707.06347, equation 7; advantages: Schulman et al. 2016, arXiv:1506.02438, "
    "equation 16",
    formula="mean_t -min(r A, clip(r, 1 - eps, 1 + eps) A), A_t = sum_l (gamma lambda)^l delta_{t+l}, "
    "delta_t = R_t + gamma V_{t+1} - V_t",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    critic=True,
    discount=1.0,
    decay=0.95,
    defaults=(
        Default(knob="clip_low", where="section 6.1"),
        Default(knob="clip_high", where="section 6.1"),
        Default(knob="decay", where="table 3"),
        Default(
            knob="discount", where="table 3", paper="0.99",
            why="the reward comes at the end of an episode; 1 as in InstructGPT, arXiv:2203.02155, appendix C.4",
        ),
        Default(
            knob="passes", where="table 3", paper="10",
            why="one, as in InstructGPT, arXiv:2203.02155, appendix C.4: a large model overfits its own samples",
        ),
        Default(
            knob="kl_reward_weight", where="InstructGPT, appendix C.4; PPO's own paper has none", paper="0.02",
            why="the reference costs another model; set algorithm.kl_reward_weight to have it",
        ),
        DUAL_CLIP,
    ),
)  # fmt: skip
