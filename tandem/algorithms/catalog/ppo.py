"""Proximal policy optimisation with a critic, as language models are trained by it.

Advantages by GAE over the policy's own tokens. The critic is trained beside, on the returns; its value loss is
``engine.train.value:value_losses``, its knobs are those of ``[critic]``.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Default

PPO = AlgorithmSpec(
    name="ppo",
    summary="advantage by GAE from a critic's values, of the reward less the KL of each token; clipped token ratio; "
    "token mean",
    source="Schulman et al. 2017, arXiv:1707.06347, equation 7; advantages: Schulman et al. 2016, arXiv:1506.02438, "
    "equation 16; of language models: Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, appendix C.4",
    formula="mean_t -min(r A, clip(r, 1 - eps, 1 + eps) A), A_t = sum_l (gamma lambda)^l delta_{t+l}, "
    "delta_t = R_t + gamma V_{t+1} - V_t",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    critic=True,
    discount=1.0,
    decay=0.95,
    kl_reward_weight=0.02,
    defaults=(
        Default(knob="clip_low", where="Schulman et al. 2017, section 6.1; InstructGPT, appendix C.4"),
        Default(knob="clip_high", where="Schulman et al. 2017, section 6.1; InstructGPT, appendix C.4"),
        Default(knob="decay", where="Schulman et al. 2017, table 3; InstructGPT, appendix C.4"),
        Default(knob="discount", where="InstructGPT, appendix C.4"),
        Default(knob="passes", where="InstructGPT, appendix C.4: one inner epoch"),
        Default(knob="kl_reward_weight", where="InstructGPT, appendix C.4"),
    ),
)
