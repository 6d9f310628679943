"""``tandem eval``."""

from __future__ import annotations

import typer

from tandem.cli import words

WHAT_HELP = (
    "A run (its exported model and recipe), or a model: a folder, a .gguf file, smollm2, gemma3, tiny. "
    "Default: the recipe's."
)


def add(app: typer.Typer) -> None:
    app.command(
        "eval",
        context_settings=words.FREE,
        options_metavar="[RECIPE...] [OPTIONS]",
        short_help="Evaluate a model on held-out tasks.",
        epilog=words.FLAGS_HELP,
    )(evaluate)


def evaluate(context: typer.Context, model: str = typer.Option("", "--model", help=WHAT_HELP)) -> None:
    """Evaluate a model on the held-out tasks of RECIPE... by the same road as in training.

    \b
    tandem eval --model last
    tandem eval --model runs/boxwork-20260101-120000-s0 --environment.num-eval-tasks 256
    tandem eval recipes/demo.toml --model smollm2
    """
    from tandem.app.evaluate import evaluate as start

    recipe, path = words.recipe_and_model(context, model)
    raise typer.Exit(start(recipe, model_path=path))
