"""What the tests of a box's network share: servers on loopback, a table of names, and a gate without a box."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from tandem.core.boxes import NetworkPolicy
from tandem.sandbox.network.attempts import Attempt
from tandem.sandbox.network.gate import PROXY_PORT, Gate
from tandem.sandbox.network.names import Names
from tandem.sandbox.network.policy import Policy


class Table:
    """Names and their addresses; ``asked`` is what was looked up."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = {name.replace("_", "."): found for name, found in addresses.items()}
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name not in self.addresses:
            raise OSError("no such name")
        return self.addresses[name]


@contextlib.asynccontextmanager
async def server(answer: bytes = b"", *, echo: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server on 127.0.0.1: its port, and what it was sent. ``echo``: it sends back what comes."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                heard.append(data)
                writer.write(data if echo else answer)
                await writer.drain()
                if not echo:
                    break
        writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with made:
        yield made.sockets[0].getsockname()[1], heard


class Door:
    """A gate whose sockets are on this machine's loopback."""

    def __init__(self, policy: NetworkPolicy, names: Names) -> None:
        self.told: list[Attempt] = []
        self.paused = False
        self.gate = Gate(Policy(policy), names, self.told.append, lambda: self.paused)
        self.ports: dict[int, int] = {}

    async def listen(self, port: int, datagrams: bool) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM)
        made.bind(("127.0.0.1", 0))
        if not datagrams:
            made.listen(16)
        self.ports[port] = made.getsockname()[1]
        return made

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.ports[PROXY_PORT])

    async def ask(self, data: bytes) -> bytes:
        """Send this to the proxy; all that comes back."""
        reader, writer = await self.connect()
        writer.write(data)
        found = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return found

    async def tunnel(self, target: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        """By CONNECT: the status line, and the connection."""
        reader, writer = await self.connect()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        return head.split(b"\r\n")[0], reader, writer


@contextlib.asynccontextmanager
async def door(policy: NetworkPolicy, table: Table | None = None) -> AsyncIterator[Door]:
    made = Door(policy, Names(table or Table()))
    await made.gate.start(made.listen)
    try:
        yield made
    finally:
        made.gate.close()
        await asyncio.sleep(0)
