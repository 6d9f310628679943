"""Checkpoints of a run, as the trainer sees them: taken between two steps, on the disk some time later.

Owns: the events of a checkpoint, and that a write which failed ends the run. Refuses: files (the store's part).
Invariants: one write at a time, a save waits for the one before; ``CheckpointBegun`` stands behind everything that a
checkpoint holds, ``CheckpointSaved`` comes only when it is on the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType

from tandem.core.errors import TandemError
from tandem.core.events import CheckpointBegun, CheckpointSaved
from tandem.core.protocols import EventSink, WeightStore


class Saver:
    """Use it as a context: leaving it waits for the write in hand, whatever ended the run."""

    def __init__(self, store: WeightStore, sink: EventSink) -> None:
        self._store = store
        self._sink = sink
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, step: int, extra: Mapping[str, object], cause: int = -1) -> None:
        """Take the checkpoint of ``step``; no step may be running. Returns when training may go on.

        Raises:
            RecordError: the write before this one failed.
        """
        started = time.perf_counter()
        await self.settled()
        begun = self._sink.emit(CheckpointBegun(step=step), cause=cause)
        writing = await asyncio.to_thread(self._store.begin, step, extra)
        held_s = time.perf_counter() - started
        self._writing = asyncio.ensure_future(self._finish(step, writing, started, held_s, begun))
        # A run that fails otherwise may never come back to it: that is no second error.
        self._writing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _finish(self, step: int, writing: Future[str], started: float, held_s: float, cause: int) -> None:
        path = await asyncio.wrap_future(writing)
        digest = await asyncio.to_thread(self._store.digest, step)
        save_s = time.perf_counter() - started
        self._sink.emit(
            CheckpointSaved(step=step, path=path, digest=digest, save_s=save_s, held_s=held_s), cause=cause
        )

    async def check(self) -> None:
        """Whether all is well so far; does not wait.

        Raises:
            RecordError: the write in hand has failed.
        """
        if self._writing is not None and self._writing.done():
            await self.settled()

    async def settled(self) -> None:
        """Wait for the write in hand.

        Raises:
            RecordError: it failed.
        """
        if (writing := self._writing) is None:
            return
        try:
            await asyncio.shield(writing)
        finally:
            if writing.done():
                self._writing = None

    async def __aenter__(self) -> Saver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            await self.settled()
            return
        with suppress(TandemError):  # the first thing that went wrong is what is told
            await self.settled()
