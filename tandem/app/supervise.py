"""Runs the work of a command under signals, with a bound on how long an end may take.

Owns: what Ctrl-C and SIGTERM do. Invariant: after the first signal the process is gone within ``SHUTDOWN_S``, whatever
the work does, and what ``last_words`` says was said.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress

from tandem.core.errors import TandemError

FINISHED, FAILED, INTERRUPTED = 0, 1, 130
SHUTDOWN_S = 4.0


def supervise(work: Callable[[], Coroutine[object, object, object]], last_words: Callable[[], None]) -> tuple[int, str]:
    """Run ``work`` in an event loop of its own until it ends or a signal cancels it; returns the exit code and, for a
    failure, what happened.

    A second signal, or ``SHUTDOWN_S`` without an end (a long computation cannot be cancelled), ends the process at
    once: ``last_words`` is called in a thread before; boxes die with the process.
    """

    def end_now() -> None:
        with suppress(Exception):
            last_words()
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    timer = threading.Timer(SHUTDOWN_S, end_now)
    timer.daemon = True
    try:
        return asyncio.run(_run(work, timer, end_now))
    finally:
        timer.cancel()


async def _run(
    work: Callable[[], Coroutine[object, object, object]], timer: threading.Timer, end_now: Callable[[], None]
) -> tuple[int, str]:
    task = asyncio.ensure_future(work())
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if timer.is_alive():
            end_now()
        print("\nstopping: ending episodes and boxes (again: at once) ...", file=sys.stderr, flush=True)
        timer.start()
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        await task
        return FINISHED, ""
    except asyncio.CancelledError:
        return INTERRUPTED, "stopped by a signal"
    except TandemError as error:
        return FAILED, f"{error.message}\nhint: {error.hint}" if error.hint else error.message
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
