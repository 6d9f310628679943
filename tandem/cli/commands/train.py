"""``tandem train``."""

from __future__ import annotations

import typer

from tandem.cli import words
from tandem.core.errors import ConfigError

RESUME_HELP = "Go on with this run (a folder, a name in runs/, or last)."
ANEW_HELP = "With --resume: begin at step 0 where no checkpoint can be used any more."


def add(app: typer.Typer) -> None:
    app.command(
        "train",
        context_settings=words.FREE,
        options_metavar="[RECIPE...] [OPTIONS]",
        short_help="Train a recipe, or go on with a run.",
        epilog=words.FLAGS_HELP,
    )(train)


def train(
    context: typer.Context,
    resume: str = typer.Option("", metavar="RUN", help=RESUME_HELP),
    anew: bool = typer.Option(False, "--anew", help=ANEW_HELP),
) -> None:
    """Train RECIPE... (TOML or YAML; later files and flags win). Without a recipe: the defaults.

    \b
    tandem train recipes/demo.toml
    tandem train recipes/demo.toml mine.toml --trainer.steps 40 --trainer.seed 1
    tandem train --environment.name my_env.py:environment
    tandem train --resume runs/boxwork-20260101-120000-s0
    """
    if not resume:
        if anew:
            raise ConfigError("--anew goes with --resume RUN", hint="without --resume every run is a new one")
        recipe, origins = words.recipe_from(context)
        from tandem.app.run import train as start

        raise typer.Exit(start(recipe, origins, command=words.command_line(context)))
    words.refuse_misspelt(context)
    if context.args:
        raise ConfigError(
            f"--resume goes on with the recipe of the run; {context.args[0]!r} would change it",
            hint="leave recipe files and flags out, or start a new run",
        )
    folder = words.run_folder(resume)
    from tandem.app.run import recipe_of
    from tandem.app.run import train as start

    recipe, origins = recipe_of(folder)
    said = words.command_line(context, ["--resume", resume])
    raise typer.Exit(start(recipe, origins, resume=folder, anew=anew, command=said))
