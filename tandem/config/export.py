"""The tree for readers: reference pages, JSON schema, a commented TOML file. Nothing is written down twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tandem.config.fields import Option, options, tables, value_of
from tandem.config.tree import Recipe


def schema() -> dict[str, object]:
    """JSON schema of a recipe file, for completion in editors."""
    head: dict[str, object] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **Recipe.model_json_schema(), "title": "Tandem recipe"}


def reference(table: str | None = None) -> str:
    """Markdown of one table's options, or of all."""
    names = [table] if table else list(tables())
    return "\n\n".join(_page(name) for name in names if _own(name)) + "\n"


def _page(table: str) -> str:
    rows = [_row(option) for option in _own(table)]
    head = f"## `[{table}]`\n\n| key | value | default | what it is |\n|---|---|---|---|\n"
    return head + "\n".join(rows)


def _row(option: Option) -> str:
    kind = f"{option.kind}, or null" if option.optional else option.kind
    doc = option.doc.replace("|", "\\|")
    return f"| `{option.path}` | {kind} | `{_toml(option.default)}` | {doc} |"


def _own(table: str) -> list[Option]:
    return [option for option in options().values() if option.path.rpartition(".")[0] == table]


def dump(recipe: Recipe, origins: Mapping[str, str] | None = None, *, comments: bool = False) -> str:
    """The recipe as a TOML file that loads to the same recipe; with each value's origin where ``origins`` is given."""
    blocks = []
    for table in tables():
        lines = list(_lines(recipe, table, origins, comments))
        if lines:
            blocks.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _lines(recipe: Recipe, table: str, origins: Mapping[str, str] | None, comments: bool) -> Iterator[str]:
    for option in _own(table):
        if comments:
            yield f"# {option.doc}"
        value = value_of(recipe, option.path)
        key = option.path.rpartition(".")[2]
        line = f"# {key} is not set" if value is None else f"{key} = {_toml(value)}"
        yield f"{line:<40} # {origins.get(option.path, 'default')}" if origins is not None else line


def _toml(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items())
        return f"{{ {inner} }}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "null" if value is None else json.dumps(value, ensure_ascii=False)
