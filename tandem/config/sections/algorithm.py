"""[algorithm]: the method and its knobs."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class AlgorithmSection(Section):
    name: str = "grpo"
    """Record in the algorithm catalog."""
    clip_low: float | None = Field(default=None, ge=0)
    """The ratio is clipped below at 1 minus this; unset: the method's own (`grpo`: 0.2)."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above at 1 plus this; unset: the method's own (`grpo`: 0.2, `dapo`: 0.28)."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, a token whose ratio is larger than this no longer pulls: without it one token
    of old data can outweigh a whole step. Unset: the method's own (3 where the method clips);
    a huge number: no bound."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty (k3) against the reference, the weights that reinforcement started from;
    0: no reference is kept."""
    length_cap: int = Field(default=256, ge=1)
    """The constant answer length, in tokens, that `dr_grpo` divides every answer's loss by."""
