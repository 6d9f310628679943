"""REINFORCE++: no critic; advantages are brought to one scale over the whole step, not within a group.

KL_t = log pi_old - log pi_ref of token t (k1).
"""

from __future__ import annotations

from tandem.algorithms.catalog.grpo import PPO_CLIP
from tandem.algorithms.spec import Aggregate, AlgorithmSpec, Default

_SOURCE = "Hu et al. 2025, REINFORCE++, arXiv:2501.03262"
_CLIPS = (Default(knob="clip_low", where=PPO_CLIP), Default(knob="clip_high", where=PPO_CLIP))
_WHITEN = Default(knob="whiten", where="the method itself: mean and deviation of all tokens of a batch")

REINFORCE_PP = AlgorithmSpec(
    name="reinforce_pp",
    summary="advantage = reward - beta x KL of the tokens from here on, whitened over the step; clipped token ratio; "
    "token mean",
    source=f"{_SOURCE}, the general form",
    formula="mean_t -min(r A, clip(r, 1 - eps, 1 + eps) A), A_t = (A'_t - mean) / std over the step, "
    "A'_t = R - beta sum_{i >= t} KL_i",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    whiten=True,
    kl_reward_weight=1e-4,
    defaults=(
        *_CLIPS,
        _WHITEN,
        Default(knob="kl_reward_weight", where="the authors' training script (OpenRLHF)"),
    ),
)

REINFORCE_PP_BASELINE = AlgorithmSpec(
    name="reinforce_pp_baseline",
    summary="advantage = reward - group mean, whitened over the step; clipped token ratio; KL k2 in the loss where "
    "it has a weight; token mean",
    source=f"{_SOURCE}, the form with a baseline",
    formula="mean_t [-min(r A, clip(r, 1 - eps, 1 + eps) A) + beta k2], A = (A' - mean) / std over the step, "
    "A' = R - mean of the group",
    credit="tandem.algorithms.advantages:centred",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    kl_weight=1e-4,
    kl_estimator="k2",
    whiten=True,
    defaults=(
        *_CLIPS,
        _WHITEN,
        Default(knob="kl_estimator", where="the method itself: k2 in the loss"),
        Default(knob="kl_weight", where="the authors' training script (OpenRLHF)"),
    ),
)
