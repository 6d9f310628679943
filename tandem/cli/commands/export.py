"""``tandem export``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from tandem.cli import words


class Format(StrEnum):
    HF = "hf"
    PEFT = "peft"
    GGUF = "gguf"


class Weights(StrEnum):
    F32 = "f32"
    BF16 = "bf16"
    Q8_0 = "q8_0"


def add(app: typer.Typer) -> None:
    app.command("export", short_help="Write a run's model for other programs.")(export)


def export(
    run: str = typer.Argument(metavar="RUN", help="A run: a folder, a name in runs/, or last."),
    to: Path = typer.Argument(metavar="TARGET", help="A new folder to write; for gguf a new file."),
    format: Format = typer.Option(  # noqa: A002
        Format.HF, "--format", help="hf: whole weights; peft: adapters alone; gguf: one file for llama.cpp."
    ),
    weights: Weights = typer.Option(Weights.BF16, "--weights", help="How gguf stores matrices."),
) -> None:
    """Write the model of a finished RUN as a Hugging Face folder or a GGUF file (adapters merged), or its adapters in
    PEFT's format.

    \b
    tandem export last exported
    tandem export last model.gguf --format gguf --weights q8_0
    tandem export runs/sft-rows-20260101-120000-s0 adapter --format peft
    """
    from tandem.app.export import export_folder, export_gguf

    folder = words.run_folder(run)
    if format is Format.GGUF:
        export_gguf(folder, to, weights=weights)
    else:
        export_folder(folder, to, adapters=format is Format.PEFT)
    print(f"wrote {to}")
