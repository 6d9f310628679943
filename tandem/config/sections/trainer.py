"""[trainer]: the run as a whole."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class TrainerSection(Section):
    steps: int = Field(default=20, ge=0)
    """Reinforcement steps."""
    seed: int = 0
    """Root of every random draw of the run."""
    deterministic: bool = False
    """Same recipe, same bits: groups are taken in order, and a resumed run equals an uninterrupted one."""
    eval_every: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0: only before, after the warm-up and at the end."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Save a checkpoint after every so many steps; 0: only at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
