"""Runs the work of a command under signals, with a bound on how long an end may take.

Owns: what Ctrl-C and SIGTERM do, exit codes, how the user calls this program. Invariants: after the first signal the
process is gone within ``SHUTDOWN_S``, whatever the work does, and what ``last_words`` says was said; nothing that the
work raises goes on as a traceback alone, without an exit code and a reason.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.core.errors import TandemError, disk_full

FINISHED, FAILED, INTERRUPTED = 0, 1, 130
REASONS = {FINISHED: "finished", INTERRUPTED: "interrupted", FAILED: "failed"}  # in the log
SHUTDOWN_S = 4.0
LAST_WORDS_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Work = Callable[[], Coroutine[object, object, object]]


def supervise(
    work: Work, last_words: Callable[[], None], *, stopping: str, interrupted: int = INTERRUPTED
) -> tuple[int, str]:
    """Run ``work`` in an event loop of its own until it ends or a signal cancels it; returns the exit code (of a
    signal: ``interrupted``) and what happened. ``stopping`` is what the user is told that a signal does. Call it from
    the main thread.

    A second signal, or ``SHUTDOWN_S`` without an end (a long computation cannot be cancelled), ends the process at
    once: ``last_words`` is called in a thread before; boxes die with the process. That holds up to the end of the
    process, whatever the caller does after the work.
    """
    ending = _Ending(last_words, stopping, interrupted)
    with ending.watched():
        return asyncio.run(_run(work, ending))


class _Ending:
    """Hears signals in a thread of its own, so that it acts while the main thread computes. The kernel's news comes
    through a pipe that Python's C part writes: no Python code runs at the place where the signal struck."""

    def __init__(self, last_words: Callable[[], None], stopping: str, code: int) -> None:
        self.code = code
        self.asked = False
        self.cancel: Callable[[], None] = lambda: None
        self._last_words = last_words
        self._stopping = stopping

    @contextmanager
    def watched(self) -> Iterator[None]:
        news, bell = os.pipe()
        os.set_blocking(bell, False)
        before = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        watcher = threading.Thread(target=self._watch, args=(news,), name="tandem-signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            if not self.asked:  # else it goes on watching: the process is to be gone soon
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(before)
                os.close(bell)  # the watcher reads the end
                watcher.join()
                os.close(news)

    def _watch(self, news: int) -> None:
        if not self._signal(news):
            return
        self.asked = True
        print(f"\nstopping: {self._stopping} (again: at once) ...", file=sys.stderr, flush=True)
        self.cancel()
        if self._ended(news):
            return
        self._end_now()

    def _signal(self, news: int) -> bool:
        """Wait for one of ours; False when the work has ended."""
        while said := os.read(news, 1):
            if said[0] in SIGNALS:
                return True
        return False

    def _ended(self, news: int) -> bool:
        """Whether the work ends within ``SHUTDOWN_S``, and before another signal."""
        deadline = time.monotonic() + SHUTDOWN_S
        while select.select([news], [], [], max(0.0, deadline - time.monotonic()))[0]:
            said = os.read(news, 1)
            if not said:
                return True
            if said[0] in SIGNALS:
                return False
        return False

    def _end_now(self) -> None:
        def speak() -> None:
            with suppress(Exception):
                self._last_words()
            with suppress(Exception):
                sys.stderr.flush()

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)  # a disk that hangs must not keep the process
        os._exit(self.code)


async def _run(work: Work, ending: _Ending) -> tuple[int, str]:
    task = asyncio.ensure_future(work())
    loop = asyncio.get_running_loop()
    ending.cancel = lambda: _later(loop, task)
    if ending.asked:  # before there was anything to cancel
        task.cancel()
    try:
        await task
        return FINISHED, ""
    except BaseException as error:  # the supervisor of a command: every end has a code and a reason
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        if ending.asked:
            return ending.code, "stopped by a signal"
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, TandemError):
            return FAILED, f"{error.message}\nhint: {error.hint}" if error.hint else error.message
        if full := disk_full(error):
            return FAILED, full
        traceback.print_exception(error)  # a fault of ours, or of the machine: it has to be found
        return FAILED, f"{type(error).__name__}: {error}"


def _later(loop: asyncio.AbstractEventLoop, task: asyncio.Future[object]) -> None:
    with suppress(RuntimeError):  # the loop has just been closed: the work has ended
        loop.call_soon_threadsafe(task.cancel)


def program() -> str:
    """How this program is called from the present folder."""
    here = Path(sys.executable).parent / "tandem"
    return _called(here, "tandem") if here.exists() else "tandem"


def interpreter() -> str:
    """How this program's Python is called from the present folder."""
    return _called(Path(sys.executable), "python")


def _called(here: Path, name: str) -> str:
    if shutil.which(name) == str(here):
        return name
    return shlex.quote(os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here))
