"""Credit: the rewards of a group, or of an episode's tokens, to advantages. NumPy, float64 inside.

Owns: group baselines, leave-one-out, generalised advantage estimation over the policy's own tokens.
Refuses: guessing a missing reward: a ``None`` stays ``None`` and counts in no statistic.
Invariants: rewards without contrast (a group of one, or all alike) give exactly 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Rewards = Sequence[float | None]

# Rewards closer together than this (relative to their size, at least 1) are alike: dividing by a deviation
# made of rounding errors would turn 0.1 + 0.2 against 0.3 into an advantage of 1.
FLAT = 1e-9


def _scored(rewards: Rewards) -> np.ndarray:
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        if isinstance(reward, bool) or not isinstance(reward, int | float | np.floating) or not np.isfinite(reward):
            raise TypeError(f"reward {index} of the group is {reward!r}, not a finite number")
    return np.array([reward for reward in rewards if reward is not None], dtype=np.float64)


def _spread(rewards: Rewards, advantages: np.ndarray) -> list[float | None]:
    scored = iter(advantages.tolist())
    return [None if reward is None else next(scored) for reward in rewards]


def is_flat(scored: np.ndarray) -> bool:
    """Whether rewards hold no contrast to learn from."""
    return scored.size < 2 or float(np.ptp(scored)) <= FLAT * max(1.0, float(np.abs(scored).max()))


def centred(rewards: Rewards) -> list[float | None]:
    """Reward minus the group mean."""
    scored = _scored(rewards)
    return _spread(rewards, np.zeros_like(scored) if is_flat(scored) else scored - scored.mean())


def standardised(rewards: Rewards, *, population: bool = False) -> list[float | None]:
    """Reward minus the group mean, over the standard deviation: that of a sample (n - 1), as GRPO's usual
    implementations take it, or of the ``population`` (n). Nothing is added to the deviation."""
    scored = _scored(rewards)
    if is_flat(scored):
        return _spread(rewards, np.zeros_like(scored))
    return _spread(rewards, (scored - scored.mean()) / scored.std(ddof=0 if population else 1))


def leave_one_out(rewards: Rewards) -> list[float | None]:
    """Reward minus the mean reward of the other scored siblings."""
    scored = _scored(rewards)
    if is_flat(scored):
        return _spread(rewards, np.zeros_like(scored))
    others = (scored.sum() - scored) / (scored.size - 1)
    return _spread(rewards, scored - others)


def plain(rewards: Rewards) -> list[float | None]:
    """The rewards themselves, for methods whose credit is finished token by token."""
    return _spread(rewards, _scored(rewards))


def overlong(tokens: int, *, cap: int, buffer: int) -> float:
    """What an answer of so many tokens adds to its reward: 0 up to ``cap - buffer``, from there on falling linearly to
    -1 at ``cap`` (DAPO, arXiv:2503.14476, equation 13)."""
    if tokens <= cap - buffer:
        return 0.0
    return -1.0 if tokens >= cap else (cap - buffer - tokens) / buffer


def whitened(advantages: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 (of the population) over all tokens of a step; without contrast exactly 0."""
    if is_flat(advantages):
        return np.zeros_like(advantages)
    return (advantages - advantages.mean()) / advantages.std()


def generalised(
    reward: float,
    values: Sequence[float] | np.ndarray,
    mask: Sequence[int] | np.ndarray,
    *,
    discount: float,
    decay: float,
    penalties: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Generalised advantage estimation (gamma ``discount``, lambda ``decay``) of one trajectory (Schulman et al. 2016,
    arXiv:1506.02438, equation 16).

    Time advances only on the policy's own tokens: observation tokens are no steps, whatever ``values`` holds
    there is not read, and they get 0. ``reward`` arrives after the last of the policy's tokens; ``penalties`` are
    taken from the reward token by token.
    """
    steps = np.flatnonzero(np.asarray(mask, dtype=np.int8))
    if len(values) != len(mask):
        raise ValueError(f"values and mask differ in length: {len(values)} and {len(mask)}")
    advantages = np.zeros(len(mask), dtype=np.float64)
    following_value, following_advantage, gain = 0.0, 0.0, float(reward)
    for step in steps[::-1]:
        if penalties is not None:
            gain -= float(penalties[step])
        surprise = gain + discount * following_value - values[step]
        advantages[step] = surprise + discount * decay * following_advantage
        following_value, following_advantage, gain = float(values[step]), float(advantages[step]), 0.0
    return advantages
