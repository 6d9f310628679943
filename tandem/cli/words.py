"""What commands that take a recipe share: free words, recipe files and flags, run folders.

Owns: the reading of ``RECIPE... --table.key value`` and of RUN arguments. Refuses: the recipe's own
checks (``config``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import typer

from tandem.config.load import load, overlay
from tandem.config.sources import parse_words
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError, RecordError

BUILTIN_MODELS = ("smollm2", "tiny")
FREE = {"allow_extra_args": True, "ignore_unknown_options": True}  # recipe flags are not listed twice
FLAGS_HELP = "Every option of a recipe is a flag: --rollout.group-size 8. See them: tandem config show."


def recipe_from(context: typer.Context) -> tuple[Recipe, dict[str, str]]:
    """The recipe that the free words of a command describe."""
    refuse_misspelt(context)
    files, _ = parse_words(context.args)
    flags = list(context.args)
    for file in files:
        flags.remove(file)
    return load(files, flags)


def recipe_over(context: typer.Context, base: tuple[Recipe, dict[str, str]]) -> tuple[Recipe, dict[str, str]]:
    """A saved recipe with the flags of a command over it."""
    refuse_misspelt(context)
    return overlay(*base, context.args)


def refuse_misspelt(context: typer.Context) -> None:
    """A flag without a dot is one of the command's own: name the nearest."""
    own = [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]
    for word in context.args:
        if re.match(r"--?[a-z]", word) and "." not in word.partition("=")[0]:
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, own, n=1)
            if near:
                raise ConfigError(f"no option {flag}", hint=f"did you mean {near[0]}?")


def run_folder(text: str, *, folder: Path = Path("runs")) -> Path:
    """The folder of a run: a path, or a name in ``folder``; ``last`` is the newest there.

    Raises:
        RecordError: there is no such run; near names are listed.
    """
    known = runs_in(folder)
    if text == "last" and known:
        return known[-1]
    for path in (Path(text), folder / text):
        if is_run(path):
            return path
    for path in (Path(text), folder / text):
        if any((path / part).exists() for part in ("recipe.json", "checkpoints", "blobs")):
            raise RecordError(f"run folder {path} has no events.jsonl, which is the run's memory",
                              hint="put the file back; without it the run can neither be shown nor go on")  # fmt: skip
    names = [path.name for path in known]
    near = difflib.get_close_matches(Path(text).name, names, n=3, cutoff=0.4) or names[-3:]
    raise RecordError(f"no run {text!r}", hint=f"such as: {', '.join(near)}" if near else f"{folder} holds no runs")


def is_run(path: Path) -> bool:
    return (path / "events.jsonl").is_file()


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder, the newest last."""
    found = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path / "events.jsonl").stat().st_mtime)


def command_line(context: typer.Context, words: Sequence[str] = ()) -> str:
    """What was typed, for the log."""
    return " ".join([context.command_path, *words, *context.args])


def recipe_and_model(context: typer.Context, model: str) -> tuple[Recipe, Path | None]:
    """The recipe to use and the model folder that overrides the recipe's: of a run, its saved recipe (with flags over
    it) and its exported model; of anything else, the recipe of the words with this model.

    Raises:
        RecordError: the run has not exported a model yet, or there is none of this name but a near one.
    """
    folder = _run_or_none(model)
    if folder is None:
        near = difflib.get_close_matches(model, [path.name for path in runs_in(Path("runs"))], n=2, cutoff=0.7)
        if model not in BUILTIN_MODELS and near and not Path(model).expanduser().exists():
            raise RecordError(f"no run and no model {model!r}", hint=f"did you mean {' or '.join(near)}?")
        recipe, origins = recipe_from(context)
        return (overlay(recipe, origins, ["--model.path", model])[0] if model else recipe), None
    from tandem.app.run import recipe_of

    recipe, _ = recipe_over(context, recipe_of(folder))
    exported = folder / "model"
    if not (exported / "config.json").is_file():
        raise RecordError(f"run {folder} has no model yet", hint=f"finish it: tandem train --resume {folder}")
    return recipe, exported


def _run_or_none(text: str) -> Path | None:
    if text == "last" or (text and (is_run(Path(text)) or is_run(Path("runs") / text))):
        return run_folder(text)
    return None
