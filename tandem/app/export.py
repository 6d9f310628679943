"""A finished run's model for other programs: a folder, or one file.

Owns: which folder of a run that is. Invariant: what is written appears whole or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tandem.core.errors import ConfigError, RecordError


def export_folder(run: Path, target: Path, *, adapters: bool) -> None:
    """Copy the run's whole weights (adapters merged), or its adapters alone, to a new folder.

    Raises:
        RecordError: the run has none. ConfigError: ``target`` exists.
    """
    source = _find(run, "adapter" if adapters else "model")
    if target.exists():
        raise ConfigError(f"{target} exists", hint="give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}-new")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    scratch.rename(target)


def export_gguf(run: Path, target: Path, *, weights: str) -> None:
    """Write the run's whole weights (adapters merged) as a new GGUF file, matrices stored as ``weights``.

    Raises:
        RecordError: the run has none. ConfigError: ``target`` exists or is not named as a file of this kind.
        ModelError: the format has no place for this model.
    """
    from tandem.models.gguf_export import export_gguf as write

    source = _find(run, "model")
    if target.suffix != ".gguf":
        raise ConfigError(f"{target} does not end in .gguf", hint=f"{target}.gguf")
    if target.exists():
        raise ConfigError(f"{target} exists", hint="give a new file")
    write(source, target, weights=weights, name=run.name)


def _find(run: Path, name: str) -> Path:
    source = run / name
    if not source.is_dir():
        whole = (run / "model").is_dir()
        raise RecordError(
            f"run {run} has no {source.name} to export",
            hint="it trained all weights: --format hf" if whole else f"finish it: tandem train --resume {run}",
        )
    return source
