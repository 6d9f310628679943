"""A stream socket of one box on the event loop, with the sockets that come along with its bytes.

Owns: the socket, what is not yet written, and received descriptors until they are taken. asyncio's own transports
read no descriptors. Invariant: a descriptor is here before the frame that names it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

READ_BYTES = 256 * 1024
MAX_RIGHTS = 8


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
        """The oldest socket received. Raises LookupError when there is none."""
        if not self._rights:
            raise LookupError("a frame names a socket that did not come")
        return socket.socket(fileno=self._rights.popleft())

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
            data, rights, _, _ = socket.recv_fds(self._sock, READ_BYTES, MAX_RIGHTS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        self._rights.extend(rights)
        if not data:
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
