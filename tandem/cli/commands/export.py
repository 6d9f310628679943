"""``tandem export``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from tandem.cli import words


class Format(StrEnum):
    HF = "hf"
    PEFT = "peft"


def add(app: typer.Typer) -> None:
    app.command("export", short_help="Write a run's model for other programs.")(export)


def export(
    run: str = typer.Argument(metavar="RUN", help="A run: a folder, a name in runs/, or last."),
    to: Path = typer.Argument(metavar="FOLDER", help="A new folder to write."),
    format: Format = typer.Option(Format.HF, "--format", help="hf: whole weights; peft: adapters alone."),  # noqa: A002
) -> None:
    """Write the model of a finished RUN as a Hugging Face folder (adapters merged), or its adapters in PEFT's format.

    \b
    tandem export last exported
    tandem export runs/sft-rows-20260101-120000-s0 adapter --format peft
    """
    from tandem.app.export import export as start

    start(words.run_folder(run), to, adapters=format is Format.PEFT)
    print(f"wrote {to}")
