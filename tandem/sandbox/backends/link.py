"""A stream socket of one box on the event loop, with the sockets that come along with its bytes.

Owns: the socket, what is not yet written, and received descriptors until they are taken. asyncio's own transports
read no descriptors. Refuses: more descriptors than frames ask for. Invariant: a descriptor is here before the frame
that names it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable

FEW_BYTES, MANY_BYTES = 4 * 1024, 256 * 1024  # most reads find one small frame
RIGHTS_BYTES = socket.CMSG_SPACE(8 * array("i").itemsize)  # at once
MAX_WAITING = 128  # that no frame has named yet


class Link:
    """Reads at once; ``received`` hears bytes, ``lost`` hears once that the other side or ``abort`` ended it."""

    def __init__(self, sock: socket.socket, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._sock = sock
        self._received = received
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._held: bytearray | None = None
        self._rights: deque[int] = deque()
        self._most = FEW_BYTES
        self._open = True
        self._loop.add_reader(sock.fileno(), self._read)

    def write(self, data: bytes) -> None:
        """Never blocks; after the end it goes nowhere."""
        if not self._open:
            return
        if self._held is not None:
            self._held += data
            return
        waiting = bool(self._unsent)
        self._unsent += data
        if not waiting:
            self._flush()
            if self._unsent and self._open:
                self._loop.add_writer(self._sock.fileno(), self._flush)

    def hold(self) -> None:
        """Send nothing that is written from now on, until ``let_go``."""
        self._held = self._held or bytearray()

    def let_go(self) -> None:
        """Idempotent."""
        held, self._held = self._held, None
        if held:
            self.write(bytes(held))

    def take(self) -> socket.socket:
        """The oldest socket received. Raises LookupError when there is none, or when it is none."""
        if not self._rights:
            raise LookupError("a frame names a socket that did not come")
        descriptor = self._rights.popleft()
        try:
            return socket.socket(fileno=descriptor)
        except OSError as error:
            os.close(descriptor)
            raise LookupError(f"what came for a socket is none: {error.strerror}") from error

    def abort(self) -> None:
        """Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        while self._rights:
            os.close(self._rights.popleft())
        self._loop.call_soon(self._lost)

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(self._most, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        for level, kind, packed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                rights = array("i")
                rights.frombytes(packed[: len(packed) - len(packed) % rights.itemsize])
                self._rights.extend(rights)
        self._most = MANY_BYTES if len(data) == self._most else FEW_BYTES
        if not data or len(self._rights) > MAX_WAITING:
            self.abort()
            return
        self._received(data)


async def opened(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams of a socket whose connection may still be under way. Raises OSError (refused); closes it then."""
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    descriptor = sock.fileno()
    loop.add_writer(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        async with asyncio.timeout(10.0):
            await ready
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        loop.remove_writer(descriptor)
        return await asyncio.open_connection(sock=sock)
    except BaseException:
        with contextlib.suppress(OSError):
            loop.remove_writer(descriptor)
        sock.close()
        raise
