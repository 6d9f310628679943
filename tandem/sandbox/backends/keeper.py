"""The supervisor's end of the keeper process, which makes and buries boxes.

Owns: the process and its control socket; a future a box that ends when nothing of the box is left.
Invariant: the keeper watches this process by pidfd; if we die in any way, it kills all boxes, removes their
cgroups and ends. If the keeper dies, the kernel kills its boxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tandem.core.errors import SandboxError, SandboxUnavailable

MESSAGE_MAX = 2048


class Keeper:
    """One keeper process. Lives on the event loop it was started on."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._gone: dict[int, asyncio.Future[str]] = {}
        self._refused: dict[int, Callable[[str], None]] = {}
        self._writing = False
        self.alive = True
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(control.fileno(), self._read)

    @classmethod
    def start(cls, program: Path, cgroup_folders: list[str]) -> Keeper:
        """Raises ``SandboxUnavailable`` when the program does not run."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        image = _sealed(program)
        try:
            process = subprocess.Popen(
                [f"/proc/self/fd/{image}", "keeper", str(theirs.fileno()), str(os.getpid()), *cgroup_folders],
                pass_fds=(image, theirs.fileno()), env={}, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxUnavailable(f"the sandbox's native program does not start: {error}") from error
        finally:
            theirs.close()
            os.close(image)
        ours.setblocking(False)
        return cls(process, ours)

    def create(
        self, box: int, message: bytes, agent: socket.socket, refused: Callable[[str], None]
    ) -> asyncio.Future[str]:
        """Ask for a box; ``agent`` is its end of the socket and is closed here. The future ends with the box;
        ``refused`` hears the reason if none is made (the future ends then, too)."""
        if not self.alive:
            agent.close()
            raise SandboxError("the sandbox keeper has died")
        gone: asyncio.Future[str] = self._loop.create_future()
        self._gone[box] = gone
        self._refused[box] = refused
        self._send(message, agent.detach())
        return gone

    def kill(self, box: int) -> None:
        if self.alive and box in self._gone:
            self._send(b"K" + struct.pack("<I", box), None)

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """End the keeper, and with it all boxes; returns when all are gone."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), timeout_s)
        if self.alive:
            self._process.kill()
            self._lost("killed: it did not end in time")
        await self._loop.run_in_executor(None, self._process.wait)

    def _send(self, message: bytes, descriptor: int | None) -> None:
        self._outbox.append((message, descriptor))
        if not self._writing:
            self._write()

    def _write(self) -> None:
        while self._outbox:
            message, descriptor = self._outbox[0]
            rights = [] if descriptor is None else [struct.pack("i", descriptor)]
            try:
                self._control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right) for right in rights])
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._control.fileno(), self._write)
                return
            except OSError as error:
                self._lost(str(error))
                return
            self._outbox.popleft()
            if descriptor is not None:
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
            elif kind == b"G":
                self._end(box, _status(struct.unpack_from("<I", message, 5)[0]))

    def _end(self, box: int, how: str) -> None:
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
        for _, descriptor in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()
        for box, refused in list(self._refused.items()):
            refused(f"the sandbox keeper has died: {why}")
            self._refused.pop(box, None)
        for box in list(self._gone):
            self._end(box, f"the sandbox keeper has died: {why}")
        if not self._ended.done():
            self._ended.set_result(None)


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
    fcntl.fcntl(image, fcntl.F_ADD_SEALS, seals)
    return image
