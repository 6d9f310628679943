"""Plug-ins by name: kinds, entry points, lookup.

Registration is data: entry points ``tandem.<kind>`` or the built-in table map a short name to
``module:attribute``. Nothing is imported until it is resolved; there is nothing to synchronise.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from tandem.core.errors import PluginError, boundary

KINDS = (
    "environment", "workflow", "reward", "algorithm", "model", "parser", "sandbox", "kernel", "transport", "cluster",
    "sink",
)


class Registry:
    """Short names of one kind of plug-in. Third parties add entry points; duplicates fail."""

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        if kind not in KINDS:
            raise PluginError(f"unknown plug-in kind {kind!r}", hint=f"kinds: {', '.join(KINDS)}")
        self.kind = kind
        self._targets = dict(builtin)
        for point in entry_points(group=f"tandem.{kind}"):
            if self._targets.get(point.name, point.value) != point.value:
                raise PluginError(
                    f"two plug-ins register {kind} {point.name!r}: {self._targets[point.name]} and {point.value}"
                )
            self._targets[point.name] = point.value

    def names(self) -> dict[str, str]:
        """All short names with their targets, without importing any."""
        return dict(sorted(self._targets.items()))

    def resolve(self, name: str) -> object:
        """Import and return the object behind a short name, ``module:attribute``, or ``file.py:attribute``.

        Raises:
            PluginError: the name is unknown (near names are listed) or its code does not import.
        """
        target = self._targets.get(name, name)
        module_name, colon, attribute = target.rpartition(":")
        if not colon:
            near = difflib.get_close_matches(name, self._targets, n=3)
            raise PluginError(
                f"no {self.kind} named {name!r}",
                hint=f"did you mean {' or '.join(near)}?" if near else
                f"known: {', '.join(sorted(self._targets))}; or give module:attribute or file.py:attribute",
            )
        with boundary(PluginError, f"{self.kind} {name!r} does not load"):
            module = _import(module_name)
        if attribute not in vars(module):
            near = difflib.get_close_matches(attribute, vars(module), n=3)
            raise PluginError(
                f"{self.kind} {name!r}: {module_name} has no {attribute!r}",
                hint=f"did you mean {' or '.join(near)}?" if near else "",
            )
        return vars(module)[attribute]


def _import(module_name: str):
    if not module_name.endswith(".py"):
        return importlib.import_module(module_name)
    path = Path(module_name).resolve()
    if not path.is_file():
        raise PluginError(f"file not found: {path}")
    # The name is derived from the path so that a pickled function resolves to one module object.
    name = f"tandem_user_{path.stem}_{zlib.crc32(str(path).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
