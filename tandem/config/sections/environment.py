"""[environment]: what the agent learns to do."""

from __future__ import annotations

from pydantic import Field

from tandem.config.sections.section import Section


class EnvironmentSection(Section):
    name: str = "boxwork"
    """Environment: a registered name, `module:attribute`, or `file.py:attribute`."""
    options: dict[str, object] = {}
    """Options of the environment's factory, by name."""
    num_eval_tasks: int = Field(default=64, ge=0)
    """Held-out tasks of one evaluation."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluations; 0: greedy."""
