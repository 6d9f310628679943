"""One device, one queue: the thread that all model computation of a process runs on.

Owns: the order of compute jobs. Inference steps and training micro-batches are jobs of two lanes; the lane
that has used less time goes first, so neither starves and the cores are never oversubscribed (two OpenMP
pools spinning on the same cores are an order of magnitude slower than one).
Invariant: a job runs alone; what one job changes (weights and their version) the next one sees whole.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tandem.core.errors import EngineError

T = TypeVar("T")


class ComputeQueue:
    """A worker thread with time-fair lanes. ``busy_s`` is the time each lane has computed."""

    def __init__(self, lanes: tuple[str, ...] = ("infer", "train")) -> None:
        self.busy_s = dict.fromkeys(lanes, 0.0)
        self._virtual_s = dict.fromkeys(lanes, 0.0)  # fairness clock; an idle lane does not save up credit
        self._jobs: dict[str, deque[tuple[Callable[[], object], asyncio.AbstractEventLoop, asyncio.Future]]] = {
            lane: deque() for lane in lanes
        }
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="tandem-compute", daemon=True)
        self._thread.start()

    async def run(self, lane: str, function: Callable[[], T]) -> T:
        """Run ``function`` on the compute thread and return what it returns or raises.

        A cancelled caller's job that has not begun is skipped; one that has begun ends by itself.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            if self._closed:
                raise EngineError("the compute queue is closed")
            if not self._jobs[lane]:
                others = [v for name, v in self._virtual_s.items() if name != lane and self._jobs[name]]
                if others:
                    self._virtual_s[lane] = max(self._virtual_s[lane], min(others))
            self._jobs[lane].append((function, loop, future))
            self._wake.notify()
        return await future

    def close(self) -> None:
        """Finish the job in hand, fail the rest, and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _next(self) -> tuple[str, Callable[[], object], asyncio.AbstractEventLoop, asyncio.Future] | None:
        with self._wake:
            while True:
                ready = [lane for lane, jobs in self._jobs.items() if jobs]
                if self._closed:
                    for lane in ready:
                        for _, loop, future in self._jobs[lane]:
                            _settle(loop, future, error=EngineError("the compute queue was closed"))
                        self._jobs[lane].clear()
                    return None
                if ready:
                    lane = min(ready, key=lambda name: self._virtual_s[name])
                    return (lane, *self._jobs[lane].popleft())
                self._wake.wait()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            lane, function, loop, future = job
            if future.cancelled():
                continue
            start = time.perf_counter()
            try:
                result, error = function(), None
            except BaseException as raised:  # a supervisor: whatever the job raised belongs to its caller
                result, error = None, raised
            spent = time.perf_counter() - start
            self.busy_s[lane] += spent
            self._virtual_s[lane] += spent
            _settle(loop, future, result=result, error=error)


def _settle(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future,
    *,
    result: object = None,
    error: BaseException | None = None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
