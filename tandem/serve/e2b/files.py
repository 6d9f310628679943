"""Files of a box as the HTTP face asks for them.

Owns: the verbs and records that ``/files`` and ``filesystem.Filesystem`` stand on. Paths that are not absolute start in
the home folder. Every verb runs in the box, as ``user`` (``agent`` or the box's ``root``), and raises ``OSError`` as
the file system does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What is known of one file. ``mode`` has its type too; ``target`` is a symbolic link's."""

    path: str
    mode: int
    size: int
    owner: str
    group: str
    modified_s: float
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """Something happened to ``path``; ``name`` is it from the watched folder on."""

    path: str
    name: str
    kind: str  # create, write, remove, rename, chmod


class BoxFiles(Protocol):
    async def read(self, path: str, *, user: str) -> AsyncGenerator[bytes, None]:
        """Its parts; what it cannot be read for is raised before the first of them. To be closed if it is not read to
        its end."""
        ...

    async def write(self, path: str, parts: AsyncIterable[bytes], *, user: str) -> None:
        """Makes the folders above it."""
        ...

    async def stat(self, path: str, *, user: str) -> FileInfo:
        """Of the file itself, not of what a link leads to."""
        ...

    async def entries(self, path: str, *, depth: int, user: str) -> list[FileInfo]: ...

    async def make_folder(self, path: str, *, user: str) -> None:
        """With those above it. Raises FileExistsError."""
        ...

    async def move(self, path: str, target: str, *, user: str) -> None: ...

    async def remove(self, path: str, *, user: str) -> None:
        """A folder with all that is in it."""
        ...

    async def watch(self, path: str, *, recursive: bool, user: str) -> AsyncGenerator[FileChange, None]:
        """What changes from now on, until it is closed."""
        ...
