"""[reward_model]: a model that judges episodes, beside the environment's own rewards."""

from __future__ import annotations

from tandem.config.sections.section import Section


class RewardModelSection(Section):
    path: str = ""
    """A reward model (what `algorithm.name = "reward"` exports; same tokenizer as the model). It scores the tokens of a
    whole episode; empty: none."""
    weight: float = 1.0
    """Its score times this is added to the reward that the environment gives."""
