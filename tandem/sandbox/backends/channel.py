"""The supervisor's end of one box's socket: calls in flight, their output, their ends.

Owns: the caps on this side (a box that sends more than it was allowed is cut off), the window of stdin bytes in
flight, and the watch on a box that does not keep its own deadlines.
Invariant: every call ends: by its exit frame, by the loss of the box, or by the watch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout
from tandem.sandbox.backend import Call, CallKind, Outcome, Start
from tandem.sandbox.backends.frames import (
    EXIT,
    FRAME_MAX,
    HEAD,
    NOT_STARTED,
    OUT_OF_MEMORY,
    PROTOCOL,
    STDIN_WINDOW,
    TIMED_OUT,
    Frame,
    frame,
    pack_environment,
    run_frame,
    start_frame,
)
from tandem.sandbox.backends.link import Link
from tandem.sandbox.backends.process import NamespaceProcess

GRACE_S = 10.0


class _Pending:
    """One call in flight."""

    __slots__ = ("call", "done", "stdout", "stderr", "unsent", "window", "patience")

    def __init__(self, call: Call, done: asyncio.Future[tuple[int, int, int, int, int]]) -> None:
        self.call = call
        self.done = done
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.unsent = memoryview(call.stdin)
        self.window = STDIN_WINDOW
        self.patience: asyncio.Timeout | None = None


class Channel:
    """One box's socket. ``hello`` is told once: None, or why the box failed; ``broken`` asks
    for the box's burial when its socket is lost or makes no sense, and ``end`` answers when it is done."""

    def __init__(
        self, environment: Mapping[str, str], hello: Callable[[str | None], None], broken: Callable[[], None],
        *, first: int = 1,
    ) -> None:
        """``first``: the number of the first call. A box that is adopted may still run calls of an earlier process."""
        self._environment = environment
        self._network_environment: Mapping[str, str] = {}
        self._packed: bytes | None = None  # what a call without an environment of its own has
        self._hello = hello
        self._broken = broken
        self._fault = ""
        self._transport: Link | None = None
        self._buffer = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._processes: dict[int, NamespaceProcess] = {}
        self._sockets: dict[int, asyncio.Future[socket.socket]] = {}
        self._next = first
        self._lost: str | None = None
        self._paused_at: float | None = None
        self._quiet: asyncio.Future[None] | None = None

    def attach(self, sock: socket.socket) -> None:
        """Speak with the box on its socket; it is closed with the channel."""
        self._transport = Link(sock, self.data_received, self._link_lost)

    def _link_lost(self) -> None:
        if self._lost is None:
            self._broken()

    def end(self, why: str) -> None:
        """Fail all calls in flight and every later one."""
        if self._lost is None:
            self._lost = self._fault or why
        if self._transport is not None:
            self._transport.abort()
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(self._gone())
        self._pending.clear()
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_exception(self._gone())
        for process in self._processes.values():
            process.on_gone()
        self._processes.clear()
        for waiting in self._sockets.values():
            if not waiting.done():
                waiting.set_exception(self._gone())
        self._sockets.clear()

    def pause(self) -> None:
        """The box stands still from now on: no deadline passes."""
        if self._paused_at is None:
            self._paused_at = asyncio.get_running_loop().time()
            for pending in self._pending.values():
                if pending.patience is not None:
                    pending.patience.reschedule(None)

    def resume(self) -> None:
        """To be told just before the box goes on: deadlines move by the length of the pause."""
        if self._paused_at is None:
            return
        loop = asyncio.get_running_loop()
        slept_s, self._paused_at = loop.time() - self._paused_at, None
        if self._transport is not None and self._lost is None:
            self._transport.write(frame(Frame.SLEPT, 0, struct.pack("<Q", round(slept_s * 1e6))))
        for pending in self._pending.values():
            if pending.patience is not None:
                pending.patience.reschedule(loop.time() + pending.call.timeout_s + GRACE_S)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Nothing is on its way in either direction meanwhile: when the box may be copied as it stands. Raises
        SandboxGone, SandboxTimeout."""
        if self._lost is not None or self._transport is None:
            raise self._gone()
        self._quiet = asyncio.get_running_loop().create_future()
        self._transport.write(frame(Frame.QUIET, 0))
        self._transport.hold()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._quiet
            yield
        except TimeoutError as error:
            raise SandboxTimeout(f"it did not fall silent in {GRACE_S:g} s") from error
        finally:
            self._transport.let_go()
            self.wake()

    @property
    def next_number(self) -> int:
        """Of its next call."""
        return self._next

    def wake(self) -> None:
        """It goes on: what its first word is for after a silence."""
        self._send(frame(Frame.SLEPT, 0, struct.pack("<Q", 0)))

    def inherit(self, parent: Channel) -> None:
        """Of a copy of a box: it runs the same commands, under the same numbers. Before ``attach``."""
        for number, old in parent._processes.items():
            process = self._processes[number] = NamespaceProcess(number, old.start, self._send, self._gone)
            process.on_started(old.pid)
        self._next = parent._next

    def _gone(self) -> SandboxGone:
        return SandboxGone(f"it is gone: {self._lost}", hint="create a new one")

    def _fail(self, fault: str) -> None:
        self._fault = fault
        if self._transport is not None:
            self._transport.abort()

    async def call(self, call: Call) -> Outcome:
        """Raises SandboxGone, SandboxTimeout (the box keeps no deadlines any more: kill it), SandboxError."""
        if self._lost is not None or self._transport is None:
            raise self._gone()
        number = self._number()
        pending = _Pending(call, asyncio.get_running_loop().create_future())
        self._transport.write(run_frame(number, call, self._with(call.environment)))
        self._pending[number] = pending
        if call.stdin or call.kind is CallKind.WRITE:
            self._feed(number, pending)
        try:
            limit_s = None if self._paused_at is not None else call.timeout_s + GRACE_S
            async with asyncio.timeout(limit_s) as pending.patience:
                code, flags, dropped_out, dropped_error, duration_us = await pending.done
        except TimeoutError as error:
            raise SandboxTimeout(
                f"it did not end a command {GRACE_S:g} s after its deadline of {call.timeout_s:g} s",
                hint="the box is killed; create a new one",
            ) from error
        except asyncio.CancelledError:
            if self._lost is None:
                self._transport.write(frame(Frame.KILL, number))
            raise
        finally:
            self._pending.pop(number, None)
        end = (code, flags, dropped_out, dropped_error, duration_us)
        return _outcome(end, bytes(pending.stdout), bytes(pending.stderr))

    def set_network_environment(self, environment: Mapping[str, str]) -> None:
        """Of commands from now on; what the box and a call say comes first."""
        self._network_environment = environment
        self._packed = None

    def _with(self, environment: Mapping[str, str]) -> bytes:
        if environment:
            return pack_environment({**self._network_environment, **self._environment, **environment})
        if self._packed is None:
            self._packed = pack_environment({**self._network_environment, **self._environment})
        return self._packed

    async def start(self, start: Start) -> NamespaceProcess:
        """Returns when the command runs. Raises OSError, SandboxGone, SandboxTimeout, SandboxError."""
        if self._lost is not None or self._transport is None:
            raise self._gone()
        number = self._number()
        process = NamespaceProcess(number, start, self._transport.write, self._gone)
        self._transport.write(start_frame(number, start, self._with(start.environment)))
        self._processes[number] = process
        try:
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(process.started)
        except TimeoutError as error:
            raise SandboxTimeout(
                f"it did not start a command in {GRACE_S:g} s", hint="the box is killed; create a new one"
            ) from error
        except asyncio.CancelledError:
            self._transport.write(frame(Frame.KILL, number))
            raise
        return process

    @property
    def processes(self) -> list[NamespaceProcess]:
        """The long-lived commands that run."""
        return list(self._processes.values())

    def carry(self, start: Start) -> tuple[int, NamespaceProcess]:
        """A command that is in the box before its agent, and its number; before ``attach``."""
        number = self._number()
        process = NamespaceProcess(number, start, self._send, self._gone)
        self._processes[number] = process
        return number, process

    def _send(self, data: bytes) -> None:
        if self._transport is not None and self._lost is None:
            self._transport.write(data)

    async def socket(self, kind: Frame, port: int, *, v6: bool = False, datagrams: bool = False) -> socket.socket:
        """A socket of the box: connected to (``CONNECT``, ``v6``: by IPv6) or listening on (``LISTEN``) a port of its
        loopback. Raises OSError (refused, in use), SandboxGone, SandboxTimeout."""
        if self._lost is not None or self._transport is None:
            raise self._gone()
        number = self._number()
        waiting = self._sockets[number] = asyncio.get_running_loop().create_future()
        self._transport.write(frame(kind, number, struct.pack("<II", port, v6 or datagrams)))
        try:
            async with asyncio.timeout(GRACE_S):
                return await waiting
        except TimeoutError as error:
            raise SandboxTimeout(f"it gave no socket for port {port} in {GRACE_S:g} s") from error
        # A caller that left keeps its entry: the socket that comes for it is closed then.

    def _number(self) -> int:
        number = self._next
        self._next = self._next % 0xFFFFFFFF + 1
        return number

    def _on_socket(self, number: int, payload: bytes) -> None:
        assert self._transport is not None
        (error,) = struct.unpack("<I", payload)
        words = os.strerror(error)
        waiting = self._sockets.pop(number, None)
        if error:
            if waiting is not None and not waiting.done():
                waiting.set_exception(OSError(error, words))
            return
        try:
            sock = self._transport.take()
        except LookupError as problem:
            self._fail(str(problem))
            return
        if waiting is None or waiting.done():
            sock.close()
        else:
            waiting.set_result(sock)

    def _on_process(self, process: NamespaceProcess, kind: int, number: int, payload: bytes) -> None:
        if kind == Frame.STARTED:
            process.on_started(struct.unpack("<I", payload)[0])
        elif kind in (Frame.STDOUT, Frame.STDERR):
            process.on_output("stdout" if kind == Frame.STDOUT else "stderr", payload)
        elif kind == Frame.STDIN_ACK:
            process.on_window(struct.unpack("<I", payload)[0])
        elif kind == Frame.EXIT:
            process.on_end(_outcome(EXIT.unpack(payload), b"", b""))
            del self._processes[number]  # last: who lies about an end is still to be told that its box is gone

    def _feed(self, number: int, pending: _Pending) -> None:
        assert self._transport is not None
        while pending.unsent and pending.window:
            part = pending.unsent[: min(pending.window, 64 * 1024)]
            pending.unsent = pending.unsent[len(part):]
            pending.window -= len(part)
            self._transport.write(frame(Frame.STDIN, number, bytes(part)))
            if not pending.unsent:
                self._transport.write(frame(Frame.STDIN, number))
        if not pending.call.stdin:
            self._transport.write(frame(Frame.STDIN, number))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEAD.size:
            length, kind, number = HEAD.unpack_from(self._buffer, start)
            if not 5 <= length <= FRAME_MAX:
                self._fail("it broke the protocol")
                return
            if len(self._buffer) - start < 4 + length:
                break
            payload = bytes(memoryview(self._buffer)[start + HEAD.size : start + 4 + length])
            start += 4 + length
            try:
                self._on_frame(kind, number, payload)
            except (struct.error, ValueError, OverflowError) as error:
                self._fail(f"it broke the protocol: {error}")
                return
            if self._fault:
                return
        del self._buffer[:start]

    def _on_frame(self, kind: int, number: int, payload: bytes) -> None:
        if kind == Frame.HELLO:
            (protocol,) = struct.unpack("<I", payload)
            self._hello(None if protocol == PROTOCOL else f"its agent speaks protocol {protocol}, not {PROTOCOL}")
            return
        if kind == Frame.QUIET:
            if self._quiet is not None and not self._quiet.done():
                self._quiet.set_result(None)
            return
        if kind == Frame.FAIL:
            self._hello(payload.decode("utf-8", "replace"))
            return
        if kind == Frame.SOCKET:
            self._on_socket(number, payload)
            return
        if (process := self._processes.get(number)) is not None:
            self._on_process(process, kind, number, payload)
            return
        pending = self._pending.get(number)
        if pending is None:
            return  # the tail of a call that was cancelled
        if kind in (Frame.STDOUT, Frame.STDERR):
            self._on_output(pending, kind, payload)
        elif kind == Frame.STDIN_ACK:
            pending.window += struct.unpack("<I", payload)[0]
            if pending.unsent:
                self._feed(number, pending)
        elif kind == Frame.EXIT and not pending.done.done():
            pending.done.set_result(EXIT.unpack(payload))

    def _on_output(self, pending: _Pending, kind: int, payload: bytes) -> None:
        call = pending.call
        if kind == Frame.STDOUT:
            kept, cap, listener = pending.stdout, call.stdout_cap_bytes, call.on_stdout
        else:
            kept, cap, listener = pending.stderr, call.stderr_cap_bytes, call.on_stderr
        if len(kept) + len(payload) > max(cap, 4096):  # the agent's own complaints may pass a tiny cap
            self._fail("it sent more output than it may")
            return
        kept += payload
        if listener is not None:
            try:
                listener(payload)
            except Exception as error:  # the listener is the caller's code: its fault ends its call, not the box
                if not pending.done.done():
                    kind_name = type(error).__name__
                    pending.done.set_exception(SandboxError(f"an output listener raised {kind_name}: {error}"))


def _outcome(end: tuple[int, int, int, int, int], stdout: bytes, stderr: bytes) -> Outcome:
    code, flags, dropped_out, dropped_error, duration_us = end
    return Outcome(
        code=None if code < 0 else code,
        stdout=stdout,
        stderr=stderr,
        dropped_bytes=dropped_out + dropped_error,
        timed_out=bool(flags & TIMED_OUT),
        started=not flags & NOT_STARTED,
        oom_killed=bool(flags & OUT_OF_MEMORY),
        duration_s=duration_us / 1e6,
    )
