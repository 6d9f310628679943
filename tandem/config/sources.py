"""Where values come from: TOML and YAML files, and flags.

Owns: syntax. A value leaves here with its dotted path, its data and its origin (file and line, or the flag);
whether it fits the tree is for ``load``, except that a key which is in no section is refused here, by its place.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.config.fields import Option, nearest, options, tables
from tandem.core.errors import ConfigError

BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Value:
    """One set option."""

    path: str
    data: object
    origin: str


def read_file(path: Path) -> list[Value]:
    """The values of a recipe file, by its ending.

    Raises:
        ConfigError: it is not there, not readable as what its ending says, or has a key of no section.
    """
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"recipe {path}: unknown kind of file", hint="recipes end in .toml, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = _near_file(path) if isinstance(error, FileNotFoundError) else ""
        if isinstance(error, UnicodeDecodeError):
            hint = f"save it as UTF-8: iconv -f latin1 -t utf-8 {path}, say"
        raise ConfigError(f"recipe {path}: {_reason(error)}", hint=hint) from error
    tree, lines = _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)
    return list(_flatten(path, tree, lines, ()))


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"is not UTF-8 text: {error}"


def _near_file(path: Path) -> str:
    folder = path.parent
    recipes = [each.name for each in folder.iterdir() if each.suffix in (".toml", ".yaml")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, recipes, n=1)
    return f"did you mean {folder / near[0]}?" if near else ""


def _read_toml(path: Path, text: str) -> tuple[Mapping[str, object], dict[str, int]]:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = int(found[1]) if found else max(1, len(text.splitlines()))
        hint = "text needs quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"recipe {path}:{line} is not valid TOML: {error}", hint=hint) from error
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = re.sub(r"[\s\"']", "", head[1])
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\-\"' ]+?)\s*=", line):
            name = re.sub(r"[\s\"']", "", key[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return tree, lines


def _read_yaml(path: Path, text: str) -> tuple[Mapping[str, object], dict[str, int]]:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {path} must hold tables, got {type(tree).__name__}")
    lines: dict[str, int] = {}

    def note(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in lines:
                    raise ConfigError(f"{path}:{line}: {name} is set a second time (first in line {lines[name]})",
                                      hint="leave one of the two out")  # fmt: skip
                lines[name] = line
                note(value, name + ".")

    assert node is not None
    note(node, "")
    return tree, lines


def _flatten(
    path: Path, tree: Mapping[str, object], lines: Mapping[str, int], prefix: tuple[str, ...]
) -> Iterator[Value]:
    for key, data in tree.items():
        name = ".".join((*prefix, str(key)))
        origin = f"{path}:{lines[name]}" if name in lines else str(path)
        if name in tables():
            if not isinstance(data, dict):
                raise ConfigError(f"{name} ({origin}) is a table, got {json.dumps(data, default=str)}")
            yield from _flatten(path, data, lines, (*prefix, str(key)))
        elif name not in options():
            what = "table" if isinstance(data, dict) else "key"
            raise ConfigError(f"{origin}: no {what} {name!r} in a recipe", hint=nearest(name))
        elif options()[name].kind == "a table" and isinstance(data, dict):
            for entry, inner in data.items():
                place = f"{name}.{entry}"
                yield Value(place, inner, f"{path}:{lines[place]}" if place in lines else origin)
        else:
            yield Value(name, data, origin)


def parse_words(words: Sequence[str]) -> tuple[list[str], list[Value]]:
    """Command-line words in any order to recipe files and the values of ``--table.key value``.

    Raises:
        ConfigError: an unknown flag (the nearest is named), a flag without its value, or a value of another type.
    """
    files: list[str] = []
    values: list[Value] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        flag, equals, text = word.partition("=")
        path = flag.removeprefix("--").replace("-", "_")
        option, entry = _option_of(path, flag)
        if option is None:
            raise ConfigError(f"no option {flag}", hint=nearest(path, flag=True))
        if not equals:
            if option.annotation is bool and (not rest or rest[0].lower() not in BOOLS):
                text = "true"
            elif not rest or (rest[0].startswith("--") and rest[0][2:3].isalpha()):
                raise ConfigError(f"{flag} needs a value: {option.kind}")
            else:
                text = rest.pop(0)
        data = _free(text) if entry else _parse(option, flag, text)
        values.append(Value(f"{option.path}.{entry}" if entry else option.path, data, f"flag {flag}"))
    return files, values


def _option_of(path: str, flag: str) -> tuple[Option | None, str]:
    """The option of a flag, and the entry's name where it reaches into a free table."""
    if path in options():
        return options()[path], ""
    for option in options().values():
        if option.kind == "a table" and path.startswith(option.path + "."):
            return option, flag.removeprefix("--")[len(option.path) + 1 :].replace("-", "_")
    return None, ""


def _free(text: str) -> object:
    """A value without a declared type: JSON where it reads as such, else text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _parse(option: Option, flag: str, text: str) -> object:
    if option.optional and text in ("null", "none"):
        return None
    if option.annotation is str or option.choices:
        return text
    if option.annotation is bool and text.lower() in BOOLS:
        return BOOLS[text.lower()]
    if option.kind.startswith("a list") and not text.startswith("["):
        return [part for part in text.split(",") if part]
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        data = _number(text)
    if data is None or (option.kind == "a table" and not isinstance(data, dict)):
        raise ConfigError(f"{flag} must be {option.kind}{' (JSON)' if option.kind == 'a table' else ''}, got {text!r}")
    return data


def _number(text: str) -> object:
    """Numbers that JSON does not write: ``.5``, ``1e-5`` is JSON already, ``1_000``."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
