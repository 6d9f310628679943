"""[record]: the memory of the run."""

from __future__ import annotations

from typing import Literal

from tandem.config.sections.section import Section


class RecordSection(Section):
    folder: str = "runs"
    """Where run folders are made."""
    name: str = ""
    """Name of the run folder; empty: made from the environment, the time and the seed."""
    sinks: tuple[Literal["console"], ...] = ("console",)
    """Where events also go: `console` (live display)."""
