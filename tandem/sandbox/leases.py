"""Which layers of images are in use here, by whom, and until when.

Owns: one shared lock a layer for as long as a box or a snapshot of this process stands on it; what eviction can lock
alone is in use nowhere. Invariant: a layer that anybody holds is locked, one that nobody holds is not. Refuses: to
keep anything alive that is gone already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from tandem.sandbox.backend import Root
from tandem.sandbox.images.store import lock_layer, place_of
from tandem.sandbox.starting import Starting


class Lease(Protocol):
    """The layers of a template stay until ``release`` (idempotent)."""

    @property
    def root(self) -> Root: ...

    @property
    def starting(self) -> Starting: ...

    def release(self) -> None: ...


class Templates(Protocol):
    """Where boxes start from, by name."""

    async def lend(self, name: str) -> Lease | None:
        """None: the backend's own template. Raises SandboxUnavailable: there is none. SandboxError: it is broken."""
        ...

    async def tidy(self) -> None:
        """Something of it is used no more: remove what there is no room or no name for."""
        ...


@runtime_checkable
class Rooted(Protocol):
    """A box that knows what its files stand on."""

    @property
    def root(self) -> Root: ...


class Leases:
    """``holder`` is the id of a box or of a snapshot."""

    def __init__(self, freed: Callable[[], None] = lambda: None) -> None:
        """``freed`` hears that something is used by nobody any more."""
        self._freed = freed
        self._locks: dict[Path, int] = {}
        self._users: dict[Path, set[str]] = {}
        self._held: dict[str, set[Path]] = {}

    def hold(self, holder: str, paths: Iterable[Path]) -> None:
        """Of the files and folders that a root is made of, those that an image brought; others have their own keeper.

        Raises:
            SandboxError: one is gone. The others are held all the same.
        """
        for place in {place_of(path) for path in paths} - {None}:
            assert place is not None
            if place not in self._locks:
                self._locks[place] = lock_layer(place)
            self._users.setdefault(place, set()).add(holder)
            self._held.setdefault(holder, set()).add(place)

    def drop(self, holder: str) -> None:
        """Idempotent."""
        free = False
        for place in self._held.pop(holder, set()):
            users = self._users[place]
            users.discard(holder)
            if not users:
                del self._users[place]
                os.close(self._locks.pop(place))
                free = True
        if free:
            self._freed()

    def close(self) -> None:
        for holder in list(self._held):
            self.drop(holder)


def paths_of(root: Root) -> list[Path]:
    return [layer.path for layer in root.layers]
