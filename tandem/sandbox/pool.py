"""Boxes made ahead of need: a lease is answered from what is ready, and the gap is filled behind it.

Worth its half megabyte a box: on version 1 cgroups a process enters a group in 15 ms when nobody did so lately (the
kernel waits for a grace period), and the rest of a creation takes 2 ms.
Owns: unused boxes of the last wanted specs. Refuses: to lease a box twice; a used box is never cleaned and given out
again. Invariant: at most ``size`` boxes of a spec are idle, and refilling never delays a caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import TandemError
from tandem.sandbox.backend import Box


class _Shelf:
    """The boxes of one spec."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.idle: deque[Box] = deque()


class Pool:
    """``size`` 0 makes every box on demand. ``num_specs``: for how many specs boxes are kept; the one that was not
    wanted for longest goes first."""

    def __init__(self, make: Callable[[SandboxSpec], Awaitable[Box]], *, size: int, num_specs: int = 1) -> None:
        self._make = make
        self._size = size
        self._num_specs = num_specs
        self._shelves: list[_Shelf] = []  # the last wanted one at the end
        self._filling: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_idle(self) -> int:
        return sum(len(shelf.idle) for shelf in self._shelves)

    async def lease(self, spec: SandboxSpec) -> Box:
        """A fresh box of ``spec``; it is the caller's from now on."""
        if not self._size or self._closed:
            return await self._make(spec)
        shelf = self._shelf(spec)
        box = None
        while shelf.idle and box is None:
            candidate = shelf.idle.popleft()
            box = None if candidate.gone.done() else candidate
        self._fill()
        return await self._make(spec) if box is None else box

    async def close(self) -> None:
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        while self._shelves:
            self._retire(self._shelves[0])
        if self._retiring:
            await asyncio.gather(*self._retiring, return_exceptions=True)

    def _shelf(self, spec: SandboxSpec) -> _Shelf:
        found = next((shelf for shelf in self._shelves if shelf.spec == spec), None) or _Shelf(spec)
        if found in self._shelves:
            self._shelves.remove(found)
        while len(self._shelves) >= self._num_specs:
            self._retire(self._shelves[0])
        self._shelves.append(found)
        return found

    def _gap(self) -> _Shelf | None:
        return next((shelf for shelf in reversed(self._shelves) if len(shelf.idle) < self._size), None)

    def _fill(self) -> None:
        if self._closed or self._gap() is None or (self._filling is not None and not self._filling.done()):
            return
        self._filling = asyncio.get_running_loop().create_task(self._refill())

    async def _refill(self) -> None:
        while (shelf := self._gap()) is not None:
            try:
                box = await self._make(shelf.spec)
            except TandemError:
                return  # the next lease makes its own box and reports what is wrong
            if shelf in self._shelves and not self._closed:
                shelf.idle.append(box)
            else:
                await box.kill()

    def _retire(self, shelf: _Shelf) -> None:
        self._shelves.remove(shelf)
        while shelf.idle:
            task = asyncio.get_running_loop().create_task(shelf.idle.popleft().kill())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
