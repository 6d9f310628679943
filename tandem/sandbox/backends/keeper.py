"""The supervisor's end of the keeper process, which makes and buries boxes.

Owns: the process and its control socket; a future a box that ends when nothing of the box is left.
Invariant: the keeper watches this process by pidfd; if we die in any way, it kills all boxes, removes their
cgroups and ends; one with a socket to be found by keeps them for a grace time and gives them to the next supervisor.
If the keeper dies, the kernel kills its boxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable, SnapshotError
from tandem.sandbox.backends.mounts import MountChoice

MESSAGE_MAX = 512 * 1024
SEAL_ATTEMPTS = 10


class BusyFiles(SnapshotError):
    """A process holds files of the box's upper: it can be copied (``tmpfs`` / ``upper``), not taken away."""

    def __init__(self, reason: str, tmpfs: str = "", upper: str = "") -> None:
        super().__init__(reason)
        self.reason, self.tmpfs, self.upper = reason, tmpfs, upper


class NotIdle(SandboxUnavailable):
    """The process that a live fork would copy does not wait for input now; in a moment it may."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A layer that was an upper: its ``path``, and where its folder lies in the box's own file system."""

    path: str
    tmpfs: str
    upper: str


class Keeper:
    """One keeper process. Lives on the event loop it was started on."""

    def __init__(self, process: subprocess.Popen[bytes] | None, control: socket.socket, pid: int) -> None:
        self._process = process  # None: started by an earlier supervisor
        self.pid = pid
        self.pids: dict[int, int] = {}  # of the boxes' agents
        self.mounts: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # see mounts.py
        self._snapshots: dict[int, asyncio.Future[str]] = {}
        self._stills: dict[int, asyncio.Future[str]] = {}
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._gone: dict[int, asyncio.Future[str]] = {}
        self._refused: dict[int, Callable[[str], None]] = {}
        self._born: dict[int, asyncio.Future[None]] = {}
        self._writing = False
        self.alive = True
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(control.fileno(), self._read)

    @classmethod
    def start(
        cls, program: Path, *, one_id: bool, listener: int = -1, grace_s: int = 0, ways: str = MountChoice().packed()
    ) -> Keeper:
        """``one_id``: this process may not give each box a range of ids; ``listener``: where later supervisors find
        the keeper, -1 to end with this one. Raises ``SandboxUnavailable`` when the program does not run."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        image = _sealed(program)
        folder = program.parent / "mounts"  # the keeper puts a file system of its own over it
        folder.mkdir(exist_ok=True)
        try:
            process = subprocess.Popen(
                [f"/proc/self/fd/{image}", "keeper", str(theirs.fileno()), str(os.getpid()),
                 "one" if one_id else "many", str(listener), str(grace_s), ways,
                 str(folder)],
                pass_fds=[fd for fd in (image, theirs.fileno(), listener) if fd >= 0], env={},
                stdin=subprocess.DEVNULL, cwd="/", start_new_session=True,
                stdout=None if listener < 0 else subprocess.DEVNULL,  # whoever reads ours sees our end
                stderr=None if listener < 0 else subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(f"the sandbox's native program does not start: {error}") from error
        finally:
            theirs.close()
            os.close(image)
        ours.setblocking(False)
        return cls(process, ours, process.pid)

    def own(self, folders: list[str]) -> None:
        """Control groups to remove when the keeper ends, children after their parents."""
        for folder in folders:
            self._send(b"O" + _text(folder), [])

    def follow(self, box: int) -> asyncio.Future[str]:
        """The future of an adopted box."""
        return self._gone.setdefault(box, self._loop.create_future())

    async def push(self, box: int) -> Pushed:
        """Make the upper of a box at rest a layer, which stays until ``release``.

        Raises:
            BusyFiles: a process holds files of it; the box is as it was.
            SnapshotError: it cannot be done; the box is as it was, or is being killed.
        """
        if not self.alive or box not in self._gone:
            raise SnapshotError("it is gone")
        answer = self._snapshots[box] = self._loop.create_future()
        self._send(b"S" + struct.pack("<I", box), [])
        return Pushed(*(await answer).split("\0"))

    async def hold(self, box: int, folder: str) -> str:
        """Make a folder a layer, as ``push`` does the upper. Raises SnapshotError."""
        if not self.alive or box not in self._gone:
            raise SnapshotError("it is gone")
        answer = self._snapshots[box] = self._loop.create_future()
        self._send(b"H" + struct.pack("<I", box) + _text(folder), [])
        return await answer

    async def still(self, box: int, pid: int) -> Pushed | None:
        """Stop a box whose one process is ``pid`` (as the box counts) for its live fork, and make its upper a layer
        as ``push`` does; None when nothing was written since it last was. The box stands still until ``go_on``.

        Raises:
            NotIdle: the process works. SandboxUnavailable: what stands in the way. The box goes on in both cases.
            SandboxGone.
        """
        if not self.alive or box not in self._gone:
            raise SandboxGone("it is gone", hint="create a new one")
        answer = self._stills[box] = self._loop.create_future()
        self._send(b"L" + struct.pack("<II", box, pid), [])
        try:
            text = await answer
        except asyncio.CancelledError:
            self.go_on(box)
            raise
        return Pushed(*text.split("\0")) if text else None

    def go_on(self, box: int) -> None:
        """After ``still``."""
        if self.alive and box in self._gone:
            self._send(b"l" + struct.pack("<I", box), [])

    def merged(self, box: int, path: str, first: str, count: int) -> None:
        """From its next root on a box stands on the held layer ``path`` where it stood on ``count`` from ``first``."""
        if self.alive and box in self._gone:
            self._send(b"M" + struct.pack("<I", box) + _text(path) + _text(first) + struct.pack("<I", count), [])

    def share(self, path: str) -> None:
        """One more holder of a layer: it stays until as many ``release``."""
        if self.alive:
            self._send(b"+" + _text(path), [])

    def release(self, path: str) -> None:
        if self.alive:
            self._send(b"R" + _text(path), [])

    def leave(self) -> None:
        """Let go of the keeper and all boxes without ending them."""
        if self.alive:
            self._lost("left to the next supervisor")

    def create(
        self, box: int, message: bytes, agent: socket.socket, ours: int, refused: Callable[[str], None],
        *, branch_of: tuple[int, int, int] | None = None,
    ) -> asyncio.Future[str]:
        """Ask for a box; ``branch_of``: a still box, and number and limit (ms; 0: none) that its process has as a
        command of the new one. ``agent`` is its end of the socket and is closed here, ``ours`` a copy of the other
        end for whoever adopts it (-1: nobody). The future ends with the box; ``refused`` hears the reason if none is
        made (the future ends then, too)."""
        if not self.alive:
            agent.close()
            if ours >= 0:
                os.close(ours)
            raise SandboxError(
                "the sandbox keeper, which makes boxes, has died", hint="`tandem doctor` shows what this machine can do"
            )
        gone: asyncio.Future[str] = self._loop.create_future()
        self._gone[box] = gone
        self._refused[box] = refused
        self._born[box] = self._loop.create_future()
        if branch_of is not None:
            message = b"B" + struct.pack("<III", *branch_of) + message
        self._send(message, [agent.detach(), *([ours] if ours >= 0 else [])])
        return gone

    async def born(self, box: int) -> None:
        """Returns when the keeper has told the pid of a box's agent, or that there is none. The agent itself may have
        answered before."""
        if (told := self._born.get(box)) is not None:
            await asyncio.shield(told)

    def kill(self, box: int) -> None:
        if self.alive and box in self._gone:
            self._send(b"K" + struct.pack("<I", box), [])

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """End the keeper, and with it all boxes; returns when all are gone."""
        if self.alive:
            self._send(b"X", [])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), timeout_s)
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            self._lost("killed: it did not end in time")
        if self._process is not None:
            await self._loop.run_in_executor(None, self._process.wait)

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        self._outbox.append((message, descriptors))
        if not self._writing:
            self._write()

    def _write(self) -> None:
        while self._outbox:
            message, descriptors = self._outbox[0]
            try:
                socket.send_fds(self._control, [message], descriptors)
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._control.fileno(), self._write)
                return
            except OSError as error:
                self._lost(str(error))
                return
            self._outbox.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._control.fileno())

    def _read(self) -> None:
        while self.alive:
            try:
                message = self._control.recv(MESSAGE_MAX)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lost("it ended")
                return
            kind, (box,) = message[:1], struct.unpack_from("<I", message, 1)
            if kind == b"E":
                reason = message[5:].decode("utf-8", "replace")
                if (refused := self._refused.pop(box, None)) is not None:
                    refused(reason)
                self._end(box, f"never made: {reason}")
            elif kind == b"W" and not self.mounts.done():
                self.mounts.set_result(message[5:].decode("utf-8", "replace"))
            elif kind == b"P":
                self.pids[box] = struct.unpack_from("<I", message, 5)[0]
                self._tell_born(box)
            elif kind == b"S":
                self._on_snapshot(box, chr(message[5]), os.fsdecode(message[6:]))
            elif kind == b"L":
                self._on_still(box, chr(message[5]), os.fsdecode(message[6:]))
            elif kind == b"G":
                self._end(box, _status(struct.unpack_from("<I", message, 5)[0]))

    def _on_snapshot(self, box: int, verdict: str, text: str) -> None:
        answer = self._snapshots.pop(box, None)
        if answer is None or answer.done():
            if verdict == "y":
                self.release(text.split("\0")[0])
        elif verdict == "y":
            answer.set_result(text)
        elif verdict == "c":
            tmpfs, upper, reason = text.split("\0")
            answer.set_exception(BusyFiles(reason, tmpfs, upper))
        else:
            answer.set_exception(SnapshotError(text))

    def _on_still(self, box: int, verdict: str, text: str) -> None:
        answer = self._stills.pop(box, None)
        if answer is None or answer.done():
            if verdict == "y" and text:
                self.release(text.split("\0")[0])
        elif verdict == "y":
            answer.set_result(text)
        elif verdict == "b":
            answer.set_exception(NotIdle(text, hint="wait for its reply, then fork again; or fork without live"))
        else:
            answer.set_exception(SandboxUnavailable(
                f"no live fork: {text}", hint="fork without live (files only), or use the gvisor backend"
            ))

    def _tell_born(self, box: int) -> None:
        if (told := self._born.pop(box, None)) is not None and not told.done():
            told.set_result(None)

    def _end(self, box: int, how: str) -> None:
        self.pids.pop(box, None)
        self._tell_born(box)
        snapshot = self._snapshots.pop(box, None)
        if snapshot is not None and not snapshot.done():
            snapshot.set_exception(SnapshotError(f"it is gone: {how}"))
        still = self._stills.pop(box, None)
        if still is not None and not still.done():
            still.set_exception(SandboxGone(f"it is gone: {how}", hint="create a new one"))
        self._refused.pop(box, None)
        gone = self._gone.pop(box, None)
        if gone is not None and not gone.done():
            gone.set_result(how)

    def _lost(self, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        if self._writing:
            self._loop.remove_writer(self._control.fileno())
        self._control.close()
        for _, descriptors in self._outbox:
            for descriptor in descriptors:
                os.close(descriptor)
        self._outbox.clear()
        for box, refused in list(self._refused.items()):
            refused(f"the sandbox keeper has died: {why}")
            self._refused.pop(box, None)
        for box in list(self._gone):
            self._end(box, f"the sandbox keeper has died: {why}")
        if not self.mounts.done():
            self.mounts.set_result(f"n-the sandbox keeper has died: {why}")
        if not self._ended.done():
            self._ended.set_result(None)


def _text(value: str) -> bytes:
    data = os.fsencode(value)
    return struct.pack("<I", len(data)) + data + b"\0"


def _status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    return f"ended with code {os.WEXITSTATUS(status)}"


def _sealed(program: Path) -> int:
    """An anonymous, unchangeable copy of the program: nothing in a box can reach or alter the file on disk."""
    try:
        image = os.memfd_create("tandem-box", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except OSError as error:
        raise SandboxUnavailable(f"no anonymous files on this machine: {error}") from error
    data = memoryview(program.read_bytes())
    while data:
        data = data[os.write(image, data):]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for attempt in range(SEAL_ATTEMPTS):
        try:
            fcntl.fcntl(image, fcntl.F_ADD_SEALS, seals)
            break
        except OSError as error:
            # EBUSY: the kernel itself holds a page of it at the moment (it waits for a sixth of a second before).
            if error.errno != errno.EBUSY or attempt == SEAL_ATTEMPTS - 1:
                os.close(image)
                raise SandboxUnavailable(f"the box program cannot be sealed in memory: {error}") from error
    return image
