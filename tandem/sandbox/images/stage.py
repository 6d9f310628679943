"""An image while it grows: its layers so far, what it says, and the variables that instructions see.

Owns: the stage, and what instructions take from it: names of users in its own tables, texts of here-documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tandem.core.errors import ConfigError
from tandem.sandbox.backend import Layer, Root
from tandem.sandbox.images.dockerfile import Instruction
from tandem.sandbox.images.manifest import ImageConfig, machine_platform
from tandem.sandbox.images.view import View
from tandem.sandbox.images.words import expand


@dataclass(slots=True)
class Stage:
    """An image while it grows. ``layers`` lowest first."""

    layers: list[Layer] = field(default_factory=list)
    host_base: bool = False
    config: ImageConfig = field(default_factory=ImageConfig)
    name: str = ""
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        return {**self.arguments, **self.config.environment}

    def change(self, **fields: object) -> None:
        self.config = msgspec.structs.replace(self.config, **fields)

    def view(self) -> View:
        return View(self.layers[::-1], host_base=self.host_base)

    def root(self) -> Root:
        return Root(
            layers=tuple(self.layers[::-1]), host_base=self.host_base, user=self.config.user or "root",
            folder=self.config.folder or "/",
        )

    def absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.config.folder.rstrip('/')}/{path}"


def expand_lines(text: str, variables: Mapping[str, str]) -> str:
    """A here-document's text with variables put in; quotes in it are only text."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\\\\$", "\\$")
    return expand(f'"{quoted}"', variables)


def with_documents(item: Instruction) -> str:
    """The shell line, its here-documents after it as in any script. A line that is only a document is its text."""
    first = item.documents[0]
    if bare(item.text.strip()) == f"<<{first.name}":
        return first.text
    rest = "".join(f"{document.text}{document.name}\n" for document in item.documents)
    return f"{item.text}\n{rest}"


def bare(word: str) -> str:
    return "<<" + word[2:].lstrip("-").strip("'\"") if word.startswith("<<") else word


def number_of(view: View, table: str, name: str) -> tuple[int, int]:
    """A user's or group's number, and the user's group, by name in the image's own table."""
    if name.isdigit():
        return int(name), int(name)
    found = view.find(view.resolve(table))
    for line in view.read(found).decode("utf-8", "replace").splitlines() if found else ():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 3 and fields[2].isdigit():
            return int(fields[2]), int(fields[3]) if fields[3].isdigit() else 0
    raise ConfigError(f"--chown: the image's /{table} has no {name!r}")


def platform_arguments() -> dict[str, str]:
    system, _, architecture = machine_platform().partition("/")
    return {
        f"{side}{name}": value
        for side in ("TARGET", "BUILD")
        for name, value in (("PLATFORM", f"{system}/{architecture}"), ("OS", system), ("ARCH", architecture),
                            ("VARIANT", ""))
    }  # fmt: skip
