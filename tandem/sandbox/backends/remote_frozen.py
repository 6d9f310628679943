"""A snapshot at an E2B-compatible service, as a root of ours.

Owns: the mark that stands for it: a layer whose folder holds one file with the snapshot's name. The files themselves
stay at the service. Refuses nothing: ``snapshot_of`` tells marks from layers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from tandem.core.errors import SnapshotMissing
from tandem.sandbox.backend import Layer, Root
from tandem.sandbox.backends.remote_errors import remote_errors

MARK = "tandem-remote-snapshot"
Forget = Callable[[str], Awaitable[object]]


class RemoteFrozen:
    """``forget`` deletes the snapshot of a name at the service."""

    live = False

    def __init__(self, name: str, marks: Path, forget: Forget) -> None:
        self._forget = forget
        self._name = name
        self._place = marks / secrets.token_hex(8)
        self._saved = self._released = False
        _mark(self._place, name)

    @property
    def root(self) -> Root:
        return Root(layers=(Layer(path=self._place),))

    async def save(self, folder: Path) -> Root:
        """From now on the service's copy stays: whoever deletes the mark leaves it there."""
        if self._released:
            raise SnapshotMissing(f"the snapshot {self._name} was released before it was saved")
        place = folder / "layer-0"
        await asyncio.to_thread(_mark, place, self._name)
        self._saved = True
        return Root(layers=(Layer(path=place),))

    async def release(self) -> None:
        if self._released:
            return
        self._released = True
        (self._place / MARK).unlink(missing_ok=True)
        if not self._saved:
            with remote_errors(f"snapshot {self._name} stays at its service"):
                await self._forget(self._name)


def snapshot_of(root: Root) -> str:
    """The name of the service's snapshot that a root stands for; '' for a root of files."""
    if len(root.layers) == 1:
        place = root.layers[0].path / MARK
        if place.is_file():
            return place.read_text()
    return ""


def _mark(place: Path, name: str) -> None:
    place.mkdir(parents=True)
    (place / MARK).write_text(name)
