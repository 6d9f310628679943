"""Files and flags to one resolved recipe, with the origin of every value.

Owns: the order (defaults < files left to right < flags) and the message for everything that can be wrong in it.
Refuses: looking at models, environments or machines. Invariant: imports nothing heavy; after ``load`` nothing changes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from tandem.config.fields import Option, nearest, options, value_of
from tandem.config.sources import Value, parse_words, read_file
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError

DEFAULT = "default"


def load(files: Sequence[Path | str] = (), flags: Sequence[str] = ()) -> tuple[Recipe, dict[str, str]]:
    """Resolve a recipe; the second value names for each option where it was set.

    ``flags`` are command-line words: ``--rollout.group-size 8`` or ``--rollout.group-size=8``.

    Raises:
        ConfigError: a key, value or combination is wrong; names file and key, and the nearest valid one.
    """
    return _resolve([value for file in files for value in read_file(Path(file))] + _only_flags(flags))


def overlay(recipe: Recipe, origins: Mapping[str, str], flags: Sequence[str]) -> tuple[Recipe, dict[str, str]]:
    """A resolved recipe with flags over it.

    Raises:
        ConfigError: as ``load``.
    """
    kept = [
        Value(path, value_of(recipe, path), origins.get(path, DEFAULT))
        for path, option in options().items()
        if option.kind != "a table"
    ]
    for table in [path for path, option in options().items() if option.kind == "a table"]:
        for key, data in cast("dict[str, object]", value_of(recipe, table)).items():
            kept.append(Value(f"{table}.{key}", data, origins.get(f"{table}.{key}", DEFAULT)))
    return _resolve(kept + _only_flags(flags))


def _only_flags(words: Sequence[str]) -> list[Value]:
    files, values = parse_words(words)
    if files:
        raise ConfigError(f"unexpected argument {files[0]!r}", hint="options are written --table.key value")
    return values


def _resolve(given: Sequence[Value]) -> tuple[Recipe, dict[str, str]]:
    values: dict[str, Value] = {}
    for value in given:
        _put(values, value)
    recipe = _validate(values)
    origins = {path: values[path].origin if path in values else DEFAULT for path in options()}
    for path, value in values.items():
        origins[path] = value.origin  # entries of a free table, such as environment.options.size
    return recipe, origins


def from_mapping(tree: Mapping[str, object]) -> Recipe:
    """A recipe from a nested mapping, such as the resolved tree that a run folder holds.

    Raises:
        ConfigError: the mapping does not fit this version.
    """
    try:
        return Recipe.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise _explain(error, {}) from error


def _put(values: dict[str, Value], value: Value) -> None:
    """A free table given whole replaces the entries set so far; an entry given after it is added."""
    option = options().get(value.path)
    if option is not None and option.kind == "a table":
        for path in [path for path in values if path.startswith(value.path + ".")]:
            del values[path]
    values[value.path] = value


def _validate(values: Mapping[str, Value]) -> Recipe:
    tree: dict[str, object] = {}
    for path in sorted(values, key=lambda path: path.count(".")):  # a whole table before its entries
        *heads, last = _segments(path)
        place = tree
        for head in heads:
            place = cast("dict[str, object]", place.setdefault(head, {}))
        place[last] = values[path].data
    try:
        return Recipe.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise _explain(error, values) from error


def _segments(path: str) -> list[str]:
    """Split at the dots; the key inside a free table is one segment whatever it holds."""
    for option in options().values():
        if option.kind == "a table" and path.startswith(option.path + "."):
            return [*option.path.split("."), path[len(option.path) + 1 :]]
    return path.split(".")


def _explain(error: ValidationError, values: Mapping[str, Value]) -> ConfigError:
    """One sentence for each mistake, the hint of the first."""
    lines, hints = [], []
    for problem in error.errors(include_url=False):
        where = [str(part) for part in problem["loc"]]
        path = next((p for n in range(len(where), 0, -1) if (p := ".".join(where[:n])) in options()), ".".join(where))
        option = options().get(path)
        origin = f" ({values[path].origin})" if path in values else ""
        if not where:  # a check that crosses sections
            lines.append(str(problem["msg"]).removeprefix("Value error, "))
            continue
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path}{origin}: no such key")
            hints.append(nearest(path))
            continue
        lines.append(f"{path}{origin}: {_sentence(problem['type'], str(problem['msg']), problem['input'], option)}")
        if option is not None and option.choices:
            near = difflib.get_close_matches(str(problem["input"]), option.choices, n=1, cutoff=0.5)
            hints.append(f"did you mean {near[0]}?" if near else "")
    return ConfigError("\n".join(lines), hint=next((hint for hint in hints if hint), ""))


def _sentence(kind: str, message: str, given: object, option: Option | None) -> str:
    """What is expected and what was given; ``kind`` is pydantic's name of the mistake."""
    shown = json.dumps(given, default=str)
    if option is None or kind.startswith(("greater_than", "less_than", "finite_number")):
        return f"{message[:1].lower()}{message[1:]}, got {shown}".replace("input should", "must")
    return f"must be {option.kind}{' or null' if option.optional else ''}, got {shown}"
