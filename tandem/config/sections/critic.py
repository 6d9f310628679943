"""[critic]: the value model of `ppo`."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class CriticSection(Section):
    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak learning rate of the critic; the rest of its optimizer is as in `[optimizer]`."""
    clip: float = Field(default=0.2, ge=0)
    """A value may move so far from the old one before its loss no longer falls; 0: no clip."""
