"""A finished run's model as a folder for other programs.

Owns: which folder of a run that is. Invariant: the folder appears whole or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tandem.core.errors import ConfigError, RecordError


def export(run: Path, target: Path, *, adapters: bool) -> None:
    """Copy the run's whole weights (adapters merged), or its adapters alone, to a new folder.

    Raises:
        RecordError: the run has none. ConfigError: ``target`` exists.
    """
    source = run / ("adapter" if adapters else "model")
    if not source.is_dir():
        whole = (run / "model").is_dir()
        raise RecordError(
            f"run {run} has no {source.name} to export",
            hint="it trained all weights: --format hf" if whole else f"finish it: tandem train --resume {run}",
        )
    if target.exists():
        raise ConfigError(f"{target} exists", hint="give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}-new")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.rename(target)
