"""Writes the pages of ``docs/reference`` that are made from the code: ``make docs``.

Owns: nothing but their layout. A test compares the pages in the tree with what this makes.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from pathlib import Path

from tandem.algorithms.spec import BUILTIN, AlgorithmSpec, Default, algorithms
from tandem.config.export import reference, schema
from tandem.core.registry import KINDS

ROOT = Path(__file__).parents[1]
MADE = "<!-- made by `make docs`; do not edit -->\n\n"


def pages() -> dict[str, str]:
    """Every generated file of ``docs/reference`` by name."""
    return {
        "options.md": f"# Options\n\n{MADE}{reference()}",
        "recipe.schema.json": json.dumps(schema(), indent=1) + "\n",
        "modules.md": f"# Modules\n\n{MADE}{_modules()}",
        "events.md": f"# Events\n\n{MADE}{_classes('core/events.py', 'Event')}",
        "errors.md": f"# Errors\n\n{MADE}{_classes('core/errors.py', 'Error')}",
        "algorithms.md": f"# Algorithms\n\n{MADE}{_algorithms()}",
        "plugins.md": f"# Plug-in kinds\n\n{MADE}{_plugins()}",
    }


def _modules() -> str:
    lines: list[str] = []
    package = ""
    for path in sorted((ROOT / "tandem").rglob("*.py")):
        place = path.relative_to(ROOT / "tandem")
        if len(place.parts) < 2 or place.name == "__init__.py":
            continue
        if place.parts[0] != package:
            package = place.parts[0]
            lines.append(f"\n## {package}: {_summary(ROOT / 'tandem' / package / '__init__.py')}\n")
        lines.append(f"- `{place}`: {_summary(path)}")
    return "\n".join(lines).lstrip() + "\n"


def _summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")


def _classes(place: str, what: str) -> str:
    tree = ast.parse((ROOT / "tandem" / place).read_text())
    lines = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (node.bases or what == "Error"):
            fields = [each.target.id for each in node.body
                      if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]  # fmt: skip
            said = " ".join((ast.get_docstring(node) or "").split())
            under = f" ({ast.unparse(node.bases[0])})" if what == "Error" else ""
            carries = f" Fields: {', '.join(f'`{name}`' for name in fields)}." if fields else ""
            lines.append(f"- **{node.name}**{under}: {f'{said}{carries}'.strip()}".rstrip(": "))
    return "\n".join(lines) + "\n"


def _algorithms() -> str:
    parts = [
        "A method is a record in `tandem/algorithms/catalog`; `[algorithm]` sets its knobs. *Values* are what a record "
        "sets of its own. *Defaults* say where in the paper each knob's value is. "
        "`passes` and `minibatches` are 1 everywhere: how many updates a rollout is good for is no part of a method, "
        "and with one the ratio is exactly 1. The learning rate and the rest of the optimizer are the recipe's.\n"
    ]
    for name in sorted(BUILTIN):
        spec = algorithms().resolve(name)
        assert isinstance(spec, AlgorithmSpec)
        told = ("name", "summary", "source", "formula", "defaults")
        differs = {
            each.name: getattr(spec, each.name)
            for each in dataclasses.fields(spec)
            if each.name not in told and getattr(spec, each.name) != each.default
        }
        values = ", ".join(f"`{key}` {value}" for key, value in differs.items() if value is not None)
        parts.append(
            f"## {name}\n\n{spec.summary}.\n\nSource: {spec.source}.\n\nLoss: `{spec.formula}`\n\nValues: {values}.\n"
        )
        if spec.defaults:
            parts.append("Defaults:\n\n" + "\n".join(_default(spec, each) for each in spec.defaults) + "\n")
    return "\n".join(parts)


def _default(spec: AlgorithmSpec, default: Default) -> str:
    return f"- `{default.knob}` {getattr(spec, default.knob)}: {default.where}."


def _plugins() -> str:
    named = "\n".join(f"- `{kind}`: entry point group `tandem.{kind}`" for kind in KINDS)
    return (
        f"{named}\n\nAn entry point maps a short name to `module:attribute`. Where a name is asked "
        "for, `module:attribute` and `file.py:attribute` work too. `tandem plugins list` shows "
        "what is there without importing it.\n"
    )


def main() -> None:
    folder = ROOT / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
        print(f"wrote {(folder / name).relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
