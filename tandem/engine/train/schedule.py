"""The learning rate of each step: a pure function of the section, the step and the last step."""

from __future__ import annotations

import math

from tandem.config.sections.optimizer import OptimizerSection


def learning_rate(section: OptimizerSection, *, step: int, total_steps: int) -> float:
    """Rate of ``step`` (from 1): linear warm-up to the peak, then the decay down to ``min_ratio`` of it."""
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    if step <= section.warmup_steps:
        return section.learning_rate * step / section.warmup_steps
    falling = max(total_steps - section.warmup_steps, 1)
    progress = min((step - section.warmup_steps) / falling, 1.0)
    if section.decay == "constant":
        return section.learning_rate
    part = 1.0 - progress if section.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.learning_rate * (section.min_ratio + (1.0 - section.min_ratio) * part)
