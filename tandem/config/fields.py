"""The options of the tree as a flat list: dotted path, type, default, sentence.

Owns: the one walk over the sections that flags, messages, schema and reference pages share.
"""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast, get_args, get_origin

from tandem.config.sections.section import Section
from tandem.config.tree import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key of the recipe. ``kind`` is what ``parse`` and messages call its type."""

    path: str
    annotation: object
    kind: str
    choices: tuple[str, ...]
    default: object
    doc: str
    optional: bool

    @property
    def flag(self) -> str:
        return "--" + self.path.replace("_", "-")


@functools.cache
def options() -> dict[str, Option]:
    """Every option of a recipe by its dotted path, in the order of the sections."""
    return {option.path: option for option in _walk(Recipe, ())}


@functools.cache
def tables() -> dict[str, type[Section]]:
    """Every table of a recipe by its dotted path."""
    return dict(_tables(Recipe, ()))


def _section_of(annotation: object) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _tables(section: type[Section], prefix: tuple[str, ...]) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        if inner := _section_of(field.annotation):
            yield ".".join((*prefix, name)), inner
            yield from _tables(inner, (*prefix, name))


def _walk(section: type[Section], prefix: tuple[str, ...]) -> Iterator[Option]:
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        if inner := _section_of(field.annotation):
            yield from _walk(inner, path)
            continue
        core, optional = _unwrap(field.annotation)
        yield Option(
            path=".".join(path),
            annotation=core,
            kind=_kind(core),
            choices=tuple(map(str, get_args(core))) if get_origin(core) is Literal else (),
            default=field.default,
            doc=" ".join((field.description or "").split()),
            optional=optional,
        )


def _unwrap(annotation: object) -> tuple[object, bool]:
    """The type without ``| None``."""
    if get_origin(annotation) in (types.UnionType, typing.Union):
        rest = [arm for arm in get_args(annotation) if arm is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _kind(core: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if isinstance(core, type) and core in names:
        return names[core]
    origin = get_origin(core)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(core)))
    if origin is dict:
        return "a table"
    entry = get_args(core)[0]
    return "a list of texts" + (f", each {_kind(entry)}" if get_origin(entry) is Literal else "")


def nearest(path: str, *, flag: bool = False) -> str:
    """A hint that names the closest options, by whole path or by last key alone; empty when none is near."""
    known = [*options(), *tables()]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    last = path.rsplit(".", 1)[-1]
    same = [name for name in options() if name.rsplit(".", 1)[-1] == last]
    by_key = difflib.get_close_matches(last, {name.rsplit(".", 1)[-1] for name in options()}, n=1, cutoff=0.75)
    close = [name for name in options() if by_key and name.rsplit(".", 1)[-1] == by_key[0]]
    found = list(dict.fromkeys([*same, *near, *close]))[:3]
    if flag:
        found = [f"--{name.replace('_', '-')}" for name in found]
    return f"did you mean {' or '.join(found)}?" if found else "tandem config show lists all options"


def value_of(recipe: Recipe, path: str) -> object:
    """The value of a dotted path."""
    place: object = recipe.model_dump(mode="json")
    for name in path.split("."):
        place = cast("dict[str, object]", place)[name]
    return place
