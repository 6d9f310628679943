"""REINFORCE++: no critic; advantages are brought to one scale over the whole step, not within a group.

Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262. KL_t = log pi_old - log pi_ref of token t (k1).
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec

REINFORCE_PP = AlgorithmSpec(
    name="reinforce_pp",
    summary="advantage = reward - beta x KL of the tokens from here on, whitened over the step; clipped token ratio; "
    "token mean",
    source="arXiv:2501.03262: A_t = R - beta sum_{i >= t} KL_i, (A - mean) / std over the batch, PPO's clip",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    whiten=True,
)

REINFORCE_PP_BASELINE = AlgorithmSpec(
    name="reinforce_pp_baseline",
    summary="advantage = reward - group mean, whitened over the step; clipped token ratio; KL k2 in the loss where "
    "it has a weight; token mean",
    source="arXiv:2501.03262: A = R - mean of the group, (A - mean) / std over the batch, KL as k2 in the loss",
    credit="tandem.algorithms.advantages:centred",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    kl_estimator="k2",
    whiten=True,
)
