"""[warmup]: supervised steps on generated demonstrations before reinforcement."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class WarmupSection(Section):
    steps: int = Field(default=0, ge=0)
    """Supervised optimizer steps; 0: none. They are evaluated separately and never counted as reinforcement."""
    batch_size: int = Field(default=16, ge=1)
    """Demonstrations in one step."""
    learning_rate: float = Field(default=2e-5, ge=0)
    """Peak learning rate of the supervised steps."""
