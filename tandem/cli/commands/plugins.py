"""``tandem plugins``."""

from __future__ import annotations

import typer

app = typer.Typer(help="Plug-ins by kind and name.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """A group of one command: ``tandem plugins list``."""


@app.command("list", short_help="List every plug-in with its code.")
def list_plugins() -> None:
    """List every plug-in with the code it names; nothing of it is imported.

    Third parties add theirs by entry points of the group tandem.KIND.
    """
    from tandem.algorithms.spec import algorithms
    from tandem.core.registry import KINDS, Registry
    from tandem.envs.environment import registry as environments
    from tandem.models.family import families
    from tandem.sandbox.factory import backends
    from tandem.text.tool_format import BUILTIN as PARSERS

    known = {
        "environment": environments(),
        "algorithm": algorithms(),
        "model": families(),
        "sandbox": backends(),
        "parser": Registry("parser", PARSERS),
    }
    for kind in KINDS:
        for name, target in (known.get(kind) or Registry(kind, {})).names().items():
            print(f"{kind:<12} {name:<16} {target}")
