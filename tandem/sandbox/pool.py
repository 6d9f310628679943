"""Boxes made ahead of need: a lease is answered from what is ready, and the gap is filled behind it.

Worth its half megabyte a box: on version 1 cgroups a process enters a group in 15 ms when nobody did so lately (the
kernel waits for a grace period), and the rest of a creation takes 2 ms.
Owns: unused boxes of the last wanted spec. Refuses: to lease a box twice; a used box is never cleaned and given out
again. Invariant: at most ``size`` boxes are idle, and refilling never delays a caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import TandemError
from tandem.sandbox.backend import Box


class Pool:
    """``size`` 0 makes every box on demand."""

    def __init__(self, make: Callable[[SandboxSpec], Awaitable[Box]], *, size: int) -> None:
        self._make = make
        self._size = size
        self._spec: SandboxSpec | None = None
        self._idle: deque[Box] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def lease(self, spec: SandboxSpec) -> Box:
        """A fresh box of ``spec``; it is the caller's from now on."""
        if self._size and spec != self._spec:
            self._retire()
            self._spec = spec
        box = None
        while self._idle and box is None:
            candidate = self._idle.popleft()
            box = None if candidate.gone.done() else candidate
        self._fill()
        return await self._make(spec) if box is None else box

    async def close(self) -> None:
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        self._retire()
        if self._retiring:
            await asyncio.gather(*self._retiring, return_exceptions=True)

    def _fill(self) -> None:
        if self._closed or len(self._idle) >= self._size or (self._filling is not None and not self._filling.done()):
            return
        self._filling = asyncio.get_running_loop().create_task(self._refill())

    async def _refill(self) -> None:
        while len(self._idle) < self._size and (spec := self._spec) is not None:
            try:
                box = await self._make(spec)
            except TandemError:
                return  # the next lease makes its own box and reports what is wrong
            if spec == self._spec and not self._closed:
                self._idle.append(box)
            else:
                await box.kill()

    def _retire(self) -> None:
        while self._idle:
            task = asyncio.get_running_loop().create_task(self._idle.popleft().kill())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
