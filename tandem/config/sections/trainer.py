"""[trainer]: the run as a whole."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class TrainerSection(Section):
    steps: int = Field(default=20, ge=0)
    """Reinforcement steps."""
    seed: int = 0
    """Root of every random draw of the run."""
    devices: int = Field(default=0, ge=0)
    """GPUs that train together, each with its shard of weights and optimizer; on a CPU, processes. 0: all GPUs of the
    machine; one process on a CPU. The gradient does not depend on it."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for another device's process; then the run ends with its name."""
    gap_alarm: float | None = Field(default=None, ge=0)
    """Warn when the sampler's and the trainer's log-probabilities of tokens of the current weights differ by more than
    this on average over a step (`logprob_gap_mean`), once until they no longer do. Unset: 0 where sampling is exact,
    0.1 where it is not: another engine, `engine.numerics = "fast"`, weights of 8 bits."""
    deterministic: bool = False
    """Same recipe, same bits: groups are taken in order, and a resumed run equals an uninterrupted one."""
    eval_every: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0: only before, after the warm-up and at the end."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Save a checkpoint after every so many steps; 0: only at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
