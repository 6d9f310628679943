"""[lora]: train low-rank adapters instead of the weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class LoraSection(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0: train all weights."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: Literal["attention", "mlp", "all"] = "all"
    """Which projections of a layer get adapters."""
    dora: bool = False
    """Learn the length of every output row apart from its direction (DoRA)."""
    path: str = ""
    """Start from this adapter, a folder in PEFT's format, whose rank, alpha and kind hold instead of those here."""
