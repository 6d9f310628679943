"""The gate of one box: the sockets in its network namespace that the host serves, and the policy they follow.

Owns: the proxy's and the resolver's socket, the connections through them, and their number. Refuses: to take more
connections than the policy has: the rest waits in the kernel's queue. Invariant: no connection is open that the
policy of now forbids.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from tandem.sandbox.network.attempts import Attempts, Bucket, Tell
from tandem.sandbox.network.budget import Budget
from tandem.sandbox.network.names import Names
from tandem.sandbox.network.outlet import Outlet
from tandem.sandbox.network.policy import Policy
from tandem.sandbox.network.proxy import Call
from tandem.sandbox.network.stub import Stub

PROXY_PORT, NAME_PORT = 3128, 53
BURST, PER_S = 200, 100.0  # connections taken, so that a box that only knocks costs the host little

URL = f"http://127.0.0.1:{PROXY_PORT}"
OWN = "localhost,127.0.0.1,::1"
ENVIRONMENT = {
    name: value
    for lower, value in (("http_proxy", URL), ("https_proxy", URL), ("all_proxy", URL), ("no_proxy", OWN))
    for name in (lower, lower.upper())
}

Listen = Callable[[int, bool], Awaitable[socket.socket]]


class Gate:
    """``still`` says that the box is paused."""

    def __init__(
        self, policy: Policy, names: Names, tell: Tell, still: Callable[[], bool], budget: Budget | None = None
    ) -> None:
        self._attempts = Attempts(tell)
        self._outlet = Outlet(policy, names, self._attempts, budget or Budget())
        self._still = still
        self._calls: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._stub: asyncio.DatagramTransport | None = None

    @property
    def open(self) -> bool:
        return self._accepting is not None

    @property
    def num_connections(self) -> int:
        return len(self._outlet.lines)

    async def start(self, listen: Listen) -> None:
        """``listen`` makes a socket on a port of the box's loopback; True: for datagrams. Idempotent.

        Raises:
            OSError: something in the box has the port.
        """
        if self.open:
            return
        made = await asyncio.gather(listen(PROXY_PORT, False), listen(NAME_PORT, True), return_exceptions=True)
        listener, names = made
        if isinstance(names, PermissionError):  # the proxy looks names up too, so this box can do without
            self._attempts.note("dns", allowed=False, why="this machine gives boxes no port below 1024")
            names = None
        if not isinstance(listener, socket.socket) or isinstance(names, BaseException):
            for each in made:
                if isinstance(each, socket.socket):
                    each.close()
            raise next(each for each in made if isinstance(each, BaseException))
        loop = asyncio.get_running_loop()
        if names is not None:
            names.setblocking(False)
            self._stub, _ = await loop.create_datagram_endpoint(lambda: Stub(self._outlet), sock=names)
        listener.setblocking(False)
        self._accepting = loop.create_task(self._accept(listener))

    def change(self, policy: Policy) -> None:
        """Follow another policy from now on; what it forbids is cut."""
        self._outlet.policy = policy
        for line in list(self._outlet.lines):
            verdict = self._outlet.judge_again(line)
            if not verdict.allowed and line.task is not None:
                self._attempts.note(line.target, allowed=False, why=f"cut by a new policy: {verdict.why}")
                line.task.cancel()
        self._room.set()

    def close(self) -> None:
        """Cut everything. Idempotent; may be started again."""
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        if self._stub is not None:
            self._stub.close()
            self._stub = None
        for call in self._calls:
            call.cancel()
        self._attempts.flush()

    async def _accept(self, listener: socket.socket) -> None:
        loop, bucket = asyncio.get_running_loop(), Bucket(BURST, PER_S)
        with listener:
            while True:
                while len(self._calls) >= self._outlet.policy.limits.connections:
                    self._room.clear()
                    await self._room.wait()
                while not bucket.take():
                    await asyncio.sleep(bucket.wait_s)
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # it left before it was taken, or we are out of descriptors for now
                    await asyncio.sleep(0.1)
                    continue
                call = loop.create_task(self._serve(connection))
                self._calls.add(call)
                call.add_done_callback(self._ended)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            connection.close()
            return
        await Call(self._outlet, reader, writer, self._still).serve()

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._room.set()
        with contextlib.suppress(asyncio.CancelledError):
            call.exception()
