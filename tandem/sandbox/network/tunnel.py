"""Bytes between a box and what it reached: in both directions, counted, watched, and cut.

Owns: the check that a connection let through by the rule of a name is spoken to that name: TLS must ask for it, and
plain HTTP, whose own header could ask for another, has its own way (``proxy``). Refuses: to hold more than one read in
memory. Invariant: of such a connection nothing from the box passes before it is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tandem.sandbox.network.hello import HANDSHAKE, MAX_HELLO, NoHello, NotYet, server_name
from tandem.sandbox.network.outlet import Line, Outlet
from tandem.sandbox.network.refusal import Refused
from tandem.sandbox.network.rules import plain_name

IDLE_S = 300.0
FIRST_TIMEOUT_S = 15.0  # from the first byte of a connection until it can be judged
CHUNK = 64 * 1024
TLS_PORT = 443
METHODS = frozenset((
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH", b"CONNECT", b"PRI", b"PROPFIND",
    b"PROPPATCH", b"MKCOL", b"COPY", b"MOVE", b"LOCK", b"UNLOCK", b"REPORT", b"SEARCH", b"PURGE", b"QUERY", b"LINK",
))


class Meter:
    """How much passes, and when something last did. ``still`` says that the box is paused: time does not count."""

    def __init__(self, outlet: Outlet, still: Callable[[], bool]) -> None:
        self._outlet = outlet
        self._still = still
        self._last = asyncio.get_running_loop().time()

    def count(self, data: bytes) -> None:
        """Raises Refused: no more may pass."""
        self._last = asyncio.get_running_loop().time()
        self._outlet.budget.count(len(data), self._outlet.policy.limits.total_bytes)

    async def watch(self) -> None:
        """Ends when nothing passed for too long."""
        loop = asyncio.get_running_loop()
        while (left := self._last + IDLE_S - loop.time()) > 0:
            await asyncio.sleep(left)
            if self._still():
                self._last = loop.time()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meter: Meter, first: bytes = b"") -> None:
    """Until the reader's end, which is passed on."""
    data = first or await reader.read(CHUNK)
    while data:
        meter.count(data)
        writer.write(data)
        await writer.drain()
        data = await reader.read(CHUNK)
    if writer.can_write_eof():
        writer.write_eof()


async def together(meter: Meter, *work: Awaitable[None]) -> None:
    """All of the work, or until one fails, or nothing passes any more.

    Raises:
        Refused, OSError: what one of them raised.
    """
    tasks = {asyncio.ensure_future(each) for each in work}
    watch = asyncio.ensure_future(meter.watch())
    try:
        while tasks:
            done, _ = await asyncio.wait({*tasks, watch}, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            if watch in done:
                return
            tasks -= done
    finally:
        for each in (*tasks, watch):
            each.cancel()
        await asyncio.gather(*tasks, watch, return_exceptions=True)


async def checked(line: Line, reader: asyncio.StreamReader, first: bytes) -> bytes:
    """The first bytes that the box sends, once they may pass.

    Raises:
        Refused: they are for somebody else, or what they are for cannot be seen.
    """
    data = first or await reader.read(CHUNK)
    if not line.by_name:
        return data
    try:
        async with asyncio.timeout(FIRST_TIMEOUT_S):
            while data and not _may_pass(line, data):
                more = await reader.read(CHUNK)
                if not more:
                    raise Refused("it ended before it could be judged")
                data += more
    except TimeoutError:
        raise Refused("it could not be judged by what it sent") from None
    return data


def _may_pass(line: Line, data: bytes) -> bool:
    """False: more must be seen. Raises Refused."""
    if data[0] == HANDSHAKE:
        try:
            asked = server_name(data)
        except NotYet:
            if len(data) > 2 * MAX_HELLO:
                raise Refused("its TLS greeting is too long") from None
            return False
        except NoHello as error:
            raise Refused(f"TLS that cannot be judged: {error}") from None
        try:
            same = plain_name(asked) == line.name
        except ValueError:
            same = False
        if not same:
            raise Refused(f"its TLS client asks for {asked or 'no name'!r}, not for {line.name!r}")
        return True
    if line.port == TLS_PORT:
        raise Refused("port 443 of an allowed name takes TLS only")
    word, space, _ = data[:16].partition(b" ")
    if space:
        if word in METHODS:
            raise Refused("plain HTTP in a tunnel: ask the proxy for the URL instead")
        return True
    return len(data) >= 16 or not any(method.startswith(word) for method in METHODS)
