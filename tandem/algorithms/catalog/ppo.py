"""Proximal policy optimisation with a critic.

Source: Schulman et al. 2017, arXiv:1707.06347, equation 7: mean_t min(r A, clip(r, 1 - eps, 1 + eps) A), eps = 0.2,
lambda = 0.95; gamma is 1, as usual where the reward comes at the end of an episode. Advantages by GAE
(arXiv:1506.02438, equation 16) over the policy's own tokens. The critic is trained beside, on the returns.
"""

from __future__ import annotations

from tandem.algorithms.spec import Aggregate, AlgorithmSpec

PPO = AlgorithmSpec(
    name="ppo",
    summary="advantage by GAE from a critic's values; clipped token ratio; token mean",
    source="Schulman et al. 2017, arXiv:1707.06347, equation 7",
    credit="tandem.algorithms.advantages:plain",
    aggregate=Aggregate.TOKEN_MEAN,
    clip_low=0.2,
    clip_high=0.2,
    clip_dual=3.0,
    critic=True,
    discount=1.0,
    decay=0.95,
)
