"""``tandem verify``."""

from __future__ import annotations

import typer

from tandem.cli import words


def add(app: typer.Typer) -> None:
    app.command(
        "verify",
        context_settings=words.FREE,
        options_metavar="[RECIPE...] [OPTIONS]",
        short_help="Check a recipe's invariants on a reduced model.",
        epilog=words.FLAGS_HELP,
    )(verify)


def verify(context: typer.Context) -> None:
    """Change what must not change a result (micro-batches, order, batch mates, shared beginnings, sampler against
    trainer), and turn every knob of the method to see that it binds. A broken invariant ends with exit code 1.

    \b
    tandem verify recipes/demo.toml
    tandem verify recipes/tiny.toml --algorithm.name gspo
    """
    recipe, _ = words.recipe_from(context)
    from tandem.app.verify import verify as start

    raise typer.Exit(start(recipe))
