"""[algorithm]: the method and its knobs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class AlgorithmSection(Section):
    name: str = "grpo"
    """Record in the algorithm catalog. A knob that is unset is the method's own; one that would change nothing for
    the method is refused."""
    clip_low: float | None = Field(default=None, ge=0)
    """The ratio is clipped below at 1 minus this; unset: the method's own (`grpo`: 0.2)."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above at 1 plus this; unset: the method's own (`grpo`: 0.2, `dapo`: 0.28)."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, a token whose ratio is larger than this no longer pulls: without it one token
    of old data can outweigh a whole step. Unset: no bound, as in the papers; 3 (arXiv:1912.09729) with
    `rollout.staleness` or several passes."""
    kl_weight: float | None = Field(default=None, ge=0)
    """Weight of the KL penalty against the reference, the weights that reinforcement started from, in the loss;
    unset: the paper's (`grpo`: 0.04). 0: none; where the reward has none either, no reference is kept: half the
    memory, and rewards that are checked do without it."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL in the loss. `k1` is refused there: its gradient is 0 on average."""
    kl_reward_weight: float | None = Field(default=None, ge=0)
    """Weight of the KL against the reference (k1) taken from the reward, instead of in the loss; unset: the paper's
    (`ppo`: 0.02, `rloo`: 0.03). 0: none."""
    entropy_weight: float | None = Field(default=None, ge=0)
    """Weight of the entropy bonus in the loss."""
    length_cap: int | None = Field(default=None, ge=1)
    """The constant answer length, in tokens, that `dr_grpo` divides every answer's loss by: the most that an answer
    may have. Unset: the paper's 3000."""
    overlong_cap: int | None = Field(default=None, ge=0)
    """Answers of so many tokens have their reward lowered by 1 (over-long shaping); 0: no shaping."""
    overlong_buffer: int | None = Field(default=None, ge=0)
    """Over the last so many tokens before `overlong_cap` the reward falls linearly."""
    whiten: bool | None = None
    """Bring the advantages of a step's tokens to mean 0 and deviation 1."""
    discount: float | None = Field(default=None, ge=0, le=1)
    """Gamma of generalised advantage estimation (`ppo`)."""
    decay: float | None = Field(default=None, ge=0, le=1)
    """Lambda of generalised advantage estimation (`ppo`)."""
    passes: int | None = Field(default=None, ge=1)
    """Optimizer passes over the samples of one step; the ratio is that of new to sampled policy."""
    minibatches: int | None = Field(default=None, ge=1)
    """Optimizer updates in one pass, each on its part of the samples."""
    importance: Literal["none", "truncated", "masked"] | None = None
    """Weight samples by the probability of the step's first weights over the sampler's, for stale samples or those of
    another engine: `truncated` at the cap, or `masked` outside of 1/cap to cap. The ratio is then of new to those."""
    importance_level: Literal["token", "sequence"] | None = None
    """Take that weight for each token, or for the whole sequence (a product)."""
    importance_cap: float | None = Field(default=None, ge=1)
    """The cap of that weight; unset: 2."""
    beta: float | None = Field(default=None, gt=0)
    """Strength of the implicit KL of preference methods (`ipo`: its tau)."""
    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """Share of preference labels that are taken to be wrong."""
    teacher: str = ""
    """Model that `distil` learns from: same tokenizer as the student."""
