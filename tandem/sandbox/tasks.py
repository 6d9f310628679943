"""Work that is done to its end, whoever stops waiting for it.

Owns: the tasks in flight. Invariant: after ``settled`` none is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Of one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end, also when the caller is cancelled."""
        return await asyncio.shield(self.own(work))

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin it; its error is whoever's that awaits the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, or written in the box's log

    async def settled(self) -> None:
        """All of it has ended, and what it began."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
