"""The supervisor's side of one long-lived command: its kept output, its listeners, its end.

Owns: the kept pieces, at most ``KEPT_BYTES``; the oldest go first, also under the eyes of a listener that is slower
than that, who is told how much. Invariant: reading never waits for a listener, so none can block or end the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.backend import Outcome, Piece, Start, Terminal
from tandem.sandbox.backends.frames import STDIN_WINDOW, Frame, frame

KEPT_BYTES = 4 * 2**20
PIECE_BYTES = 160  # what a piece costs beside its data: a command that writes byte by byte must not fill our memory
SIGNALS = range(1, 65)


class NamespaceProcess:
    """One command; made by the channel, which feeds ``on_frame``'s pieces into it."""

    def __init__(
        self, number: int, start: Start, send: Callable[[bytes], None], gone: Callable[[], SandboxGone]
    ) -> None:
        loop = asyncio.get_running_loop()
        self._number = number
        self._start = start
        self._send = send
        self._gone = gone
        self._pid = 0
        self.started: asyncio.Future[None] = loop.create_future()
        self._end: asyncio.Future[Outcome] = loop.create_future()
        self._pieces: deque[Piece] = deque()
        self._first = 0  # the number of the oldest kept piece
        self._kept = 0
        self._cost = 0
        self._dropped = 0
        self._news = asyncio.Event()
        self._window = STDIN_WINDOW
        self._room = asyncio.Event()
        self._room.set()
        self._writing = asyncio.Lock()
        self._input_open = start.stdin or start.terminal is not None

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def ended(self) -> bool:
        return self._end.done()

    # ---- from the channel

    def on_started(self, pid: int) -> None:
        self._pid = pid
        if not self.started.done():
            self.started.set_result(None)

    def on_output(self, stream: str, data: bytes) -> None:
        if not data:
            return
        self._pieces.append(Piece("pty" if self._start.terminal is not None else stream, data))
        self._kept += len(data)
        self._cost += len(data) + PIECE_BYTES
        while self._cost > KEPT_BYTES:
            lost = len(self._pieces.popleft().data)
            self._first += 1
            self._kept -= lost
            self._cost -= lost + PIECE_BYTES
            self._dropped += lost
        self._tell()

    def on_window(self, num_bytes: int) -> None:
        self._window += num_bytes
        self._room.set()

    def on_end(self, outcome: Outcome) -> None:
        if not self.started.done():
            code = outcome.code or 0
            self.started.set_exception(OSError(code, os.strerror(code), self._start.arguments[0]))
        if not self._end.done():
            self._end.set_result(outcome)
        self._room.set()
        self._tell()

    def on_gone(self) -> None:
        for future in (self.started, self._end):
            if not future.done():
                future.set_exception(self._gone())
                future.exception()  # asked for, so that nobody must
        self._room.set()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ---- for the user

    async def output(self, *, from_start: bool = False) -> AsyncIterator[Piece]:
        at = self._first if from_start else self._first + len(self._pieces)
        seen = 0 if from_start else self._dropped + self._kept  # bytes
        while True:
            news = self._news
            at = max(at, self._first)
            while at < self._first + len(self._pieces):
                piece = self._pieces[at - self._first]
                if seen < self._dropped:
                    piece = replace(piece, lost_bytes=self._dropped - seen)
                    seen = self._dropped
                at += 1
                seen += len(piece.data)
                yield piece
                at = max(at, self._first)
            if self._end.done():
                self._end.result()  # raises when the box died first
                return
            if news is self._news:
                await news.wait()

    async def wait(self) -> Outcome:
        return await asyncio.shield(self._end)

    async def send_stdin(self, data: bytes) -> None:
        view = memoryview(data)
        async with self._writing:
            while view:
                self._require_input()
                if not self._window:
                    self._room.clear()
                    await self._room.wait()
                    continue
                part = view[: min(self._window, 64 * 1024)]
                view = view[len(part):]
                self._window -= len(part)
                self._send(frame(Frame.STDIN, self._number, bytes(part)))

    @property
    def start(self) -> Start:
        """What it was started with."""
        return self._start

    @contextlib.asynccontextmanager
    async def input_held(self, timeout_s: float) -> AsyncIterator[None]:
        """Meanwhile nothing is on its way to its stdin: what was sent has arrived, what comes now waits. Raises
        TimeoutError: it does not take what was sent."""
        async with self._writing:
            async with asyncio.timeout(timeout_s):
                while self._window < STDIN_WINDOW and not self.ended:
                    self._room.clear()
                    await self._room.wait()
            yield

    async def close_stdin(self) -> None:
        """Idempotent; on a terminal it is the end-of-file character."""
        if self._start.terminal is not None:
            await self.send_stdin(b"\x04")
            return
        async with self._writing:
            if self._input_open and not self.ended:
                self._input_open = False
                self._send(frame(Frame.STDIN, self._number))

    async def resize(self, terminal: Terminal) -> None:
        if self._start.terminal is None:
            raise SandboxError(f"process {self._pid} has no terminal")
        self._send(frame(Frame.RESIZE, self._number, struct.pack("<II", terminal.columns, terminal.rows)))

    async def signal(self, number: int) -> None:
        """To the process group; SIGKILL to everything below it, whatever session it made for itself."""
        if number not in SIGNALS:
            raise ValueError(f"no signal {number}")
        if not self.ended:
            self._send(frame(Frame.SIGNAL, self._number, struct.pack("<I", number)))

    async def kill(self) -> None:
        await self.signal(signal.SIGKILL)

    def _require_input(self) -> None:
        if self.ended:
            raise SandboxError(f"process {self._pid} has ended")
        if not self._input_open:
            raise SandboxError(f"the stdin of process {self._pid} is closed", hint="start it with stdin=True")
