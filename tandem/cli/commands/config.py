"""``tandem config``: recipes without running them."""

from __future__ import annotations

import json

import typer

from tandem.cli import words
from tandem.config.export import dump, reference, schema
from tandem.config.fields import tables
from tandem.core.errors import ConfigError
from tandem.record.summary import table

app = typer.Typer(help="Look at recipes and their options.", no_args_is_help=True, rich_markup_mode=None)


@app.command(
    context_settings=words.FREE,
    options_metavar="[RECIPE...] [OPTIONS]",
    short_help="Print a resolved recipe.",
    epilog=words.FLAGS_HELP,
)
def show(
    context: typer.Context,
    origins: bool = typer.Option(False, help="Say where each value was set."),
    comments: bool = typer.Option(False, help="Say what each option is."),
) -> None:
    """Print the resolved recipe of RECIPE... and flags as TOML.

    \b
    tandem config show recipes/demo.toml --origins
    tandem config show --comments > mine.toml
    """
    recipe, where = words.recipe_from(context)
    print(dump(recipe, where if origins else None, comments=comments), end="")


@app.command(
    context_settings=words.FREE,
    options_metavar="[RECIPE...] [OPTIONS]",
    short_help="Check a recipe, its environment, its model and the boxes.",
    epilog=words.FLAGS_HELP,
)
def check(context: typer.Context) -> None:
    """Check RECIPE... and flags as a run would, up to loading the model: environment, prompts or data, model folder, a
    box, and the memory that each phase will need.

    \b
    tandem config check recipes/demo.toml --rollout.group-size 16
    """
    recipe, _ = words.recipe_from(context)
    from tandem.app.ledger import check_memory
    from tandem.app.offline import is_offline, prepare_offline
    from tandem.app.preflight import prepare

    if is_offline(recipe):
        data = prepare_offline(recipe)
        model, what = data.model, f"{len(data.loaded.streams)} of {data.loaded.num_rows} rows of {recipe.data.path}"
    else:
        ready = prepare(recipe)
        model, what = ready.model, f"environment {ready.environment.name}"
    print(table(check_memory(recipe, model).rows()), end="\n\n")
    print(f"good: {what}, model {model.path}, context of {model.max_context_tokens} tokens")


@app.command("schema", short_help="Print the JSON schema of recipe files.")
def print_schema() -> None:
    """Print the JSON schema of recipe files, for completion in editors."""
    print(json.dumps(schema(), indent=1))


@app.command("reference")
def print_reference(table: str = typer.Argument("", help="One table, such as rollout or engine.infer.")) -> None:
    """Print what every option is, as Markdown; of one TABLE, or of all."""
    if table and table not in tables():
        raise ConfigError(f"no table {table!r}", hint=f"tables: {', '.join(tables())}")
    print(reference(table or None), end="")
