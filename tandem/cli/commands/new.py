"""``tandem new``: a start for your own code."""

from __future__ import annotations

import keyword
import shlex
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import typer

from tandem.app.supervise import interpreter, program
from tandem.core.errors import ConfigError, writing

app = typer.Typer(help="Write the start of a plug-in.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """A group: ``tandem new environment``."""


@app.command()
def environment(
    name: str = typer.Argument(help="A Python name, such as word_game."),
    folder: Path = typer.Option(Path("."), help="Where to write."),
) -> None:
    """Write NAME.py, a whole environment that trains as it is, and test_NAME.py beside it."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"{name!r} is no lower-case Python name", hint="such as word_game")
    made = {folder / f"{name}.py": "environment.py.txt", folder / f"test_{name}.py": "test_environment.py.txt"}
    for path in made:
        if path.exists():
            raise ConfigError(f"{path} exists", hint="choose another name, or remove it")
    with writing(folder, ConfigError, hint="choose another --folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in made.items():
            text = (files("tandem.cli") / "templates" / template).read_text()
            path.write_text(text.replace("NAME", name))
            print(f"wrote {path}")
    test, code = shlex.quote(str(folder / f"test_{name}.py")), shlex.quote(f"{folder / f'{name}.py'}:{name}")
    if find_spec("pytest") is None:
        print(f"first:    {interpreter()} -m pip install pytest")
    print(f"check it: {interpreter()} -m pytest {test}")
    print(f"train it: {program()} train --environment.name {code}")
