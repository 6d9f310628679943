"""The proxy that a box sees on its loopback: HTTP with CONNECT and plain requests, and SOCKS 5, on one port.

Owns: both protocols as far as a box needs them. A plain request goes out with the host name of its URL, whatever its
header says. Refuses: SOCKS by UDP or inward, one connection for several plain requests (each is answered with
``Connection: close``).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import h11

from tandem.core.errors import TandemError
from tandem.sandbox.network.outlet import Line, Outlet
from tandem.sandbox.network.refusal import Refused, Unreachable
from tandem.sandbox.network.tunnel import CHUNK, Meter, checked, pump, together

HEAD_TIMEOUT_S = 15.0
MAX_HEAD = 64 * 1024
SOCKS = 5
HOP = frozenset((
    b"connection", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"keep-alive", b"te", b"trailer",
    b"upgrade", b"host", b"expect",
))
NO_SUCH = {"refused": 2, "unreachable": 4, "command": 7, "address": 8}  # SOCKS replies


class Call:
    """One connection of the box to its proxy. ``lines`` are told to the outlet while they are open."""

    def __init__(
        self, outlet: Outlet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, still: Callable[[], bool]
    ) -> None:
        self._outlet = outlet
        self._reader, self._writer = reader, writer
        self._meter = Meter(outlet, still)
        self._failed = False

    async def serve(self) -> None:
        """Never raises but for cancellation; closes both ends."""
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                first = await self._reader.read(1)
            if first and first[0] == SOCKS:
                await self._socks()
            elif first:
                await self._http(first)
        except (OSError, EOFError, TimeoutError, h11.ProtocolError):
            pass  # the box left, or spoke no protocol of ours
        except TandemError:
            self._failed = True  # its attempt could not be told: it must not happen
        finally:
            _end(self._writer, abort=self._failed)

    # ---- HTTP

    async def _http(self, first: bytes) -> None:
        ours = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        ours.receive_data(first)
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                request = await self._event(ours, self._reader)
        except h11.RemoteProtocolError as error:
            await self._say(400, f"no HTTP request: {error}")
            return
        if not isinstance(request, h11.Request):
            return
        tunnels = request.method == b"CONNECT"
        try:
            host, port, path = _authority(request.target) if tunnels else _absolute(request.target)
        except ValueError as error:
            await self._say(400, str(error))
            return
        try:
            line, reader, writer = await self._outlet.open(host, port)
        except Refused as error:
            await self._say(403, f"{host}:{port} is not allowed: {error}")
            return
        except Unreachable as error:
            await self._say(502, str(error))
            return
        if tunnels:
            self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._hold(line, writer, self._tunnel(line, reader, writer, ours.trailing_data[0]))
        else:
            await self._hold(line, writer, self._request(ours, request, path, reader, writer))

    async def _request(
        self, ours: h11.Connection, request: h11.Request, path: bytes, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        theirs = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        named = {token.strip().lower() for name, value in request.headers if name == b"connection"
                 for token in value.split(b",")} - {b"content-length", b"transfer-encoding"}  # fmt: skip
        headers = [(name, value) for name, value in request.headers if name not in HOP and name not in named]
        host = urlsplit(request.target.decode("ascii")).netloc.rpartition("@")[2].encode()
        if ours.they_are_waiting_for_100_continue:
            self._writer.write(ours.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        head = theirs.send(h11.Request(
            method=request.method, target=path, headers=[(b"host", host), (b"connection", b"close"), *headers]
        ))
        writer.write(head or b"")
        upward = asyncio.ensure_future(self._send_body(ours, theirs, writer))
        try:
            await together(self._meter, self._send_answer(ours, theirs, reader))
        finally:
            upward.cancel()
            await asyncio.gather(upward, return_exceptions=True)

    async def _send_body(self, ours: h11.Connection, theirs: h11.Connection, writer: asyncio.StreamWriter) -> None:
        while True:
            event = await self._event(ours, self._reader)
            if isinstance(event, h11.Data):
                self._meter.count(bytes(event.data))
                writer.write(theirs.send(h11.Data(data=bytes(event.data))) or b"")
                await writer.drain()
            elif isinstance(event, h11.EndOfMessage):
                writer.write(theirs.send(h11.EndOfMessage(headers=event.headers)) or b"")
                return
            else:
                writer.transport.abort()  # half a request must not be taken for a whole one
                return

    async def _send_answer(self, ours: h11.Connection, theirs: h11.Connection, reader: asyncio.StreamReader) -> None:
        while True:
            event = await self._event(theirs, reader)
            if isinstance(event, h11.Response):
                headers = [(name, value) for name, value in event.headers if name not in HOP]
                event = h11.Response(status_code=event.status_code, reason=event.reason,
                                     headers=[*headers, (b"connection", b"close")])  # fmt: skip
            elif isinstance(event, h11.Data):
                self._meter.count(bytes(event.data))
            elif not isinstance(event, h11.EndOfMessage):
                if isinstance(event, h11.InformationalResponse):
                    continue
                return
            self._writer.write(ours.send(event) or b"")
            await self._writer.drain()
            if isinstance(event, h11.EndOfMessage):
                return

    async def _event(self, connection: h11.Connection, reader: asyncio.StreamReader) -> object:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await reader.read(CHUNK))
        return event

    async def _say(self, status: int, why: str) -> None:
        text = f"{why}\n".encode()
        words = {400: b"Bad Request", 403: b"Forbidden", 502: b"Bad Gateway"}[status]
        self._writer.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n"
            b"\r\n%s" % (status, words, len(text), text)
        )
        await self._writer.drain()

    # ---- SOCKS 5 (RFC 1928)

    async def _socks(self) -> None:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            methods = await self._reader.readexactly((await self._reader.readexactly(1))[0])
            self._writer.write(bytes((SOCKS, 0 if 0 in methods else 0xFF)))
            if 0 not in methods:
                return
            version, command, _, kind = await self._reader.readexactly(4)
            host = await self._socks_host(kind)
            (port,) = struct.unpack(">H", await self._reader.readexactly(2))
        if version != SOCKS or not host:
            await self._reply(NO_SUCH["address"])
        elif command != 1:
            self._outlet.attempts.note(f"socks {command} {host}:{port}", allowed=False, why="SOCKS only connects here")
            await self._reply(NO_SUCH["command"])
        else:
            try:
                line, reader, writer = await self._outlet.open(host, port)
            except Refused:
                await self._reply(NO_SUCH["refused"])
            except Unreachable:
                await self._reply(NO_SUCH["unreachable"])
            else:
                await self._reply(0)
                await self._hold(line, writer, self._tunnel(line, reader, writer, b""))

    async def _socks_host(self, kind: int) -> str:
        """'' : of a kind that there is not."""
        if kind == 1:
            return ".".join(str(byte) for byte in await self._reader.readexactly(4))
        if kind == 4:
            words = struct.unpack(">8H", await self._reader.readexactly(16))
            return ":".join(f"{word:x}" for word in words)
        if kind == 3:
            name = await self._reader.readexactly((await self._reader.readexactly(1))[0])
            return name.decode("utf-8", "replace")
        return ""

    async def _reply(self, code: int) -> None:
        self._writer.write(bytes((SOCKS, code, 0, 1, 0, 0, 0, 0, 0, 0)))
        await self._writer.drain()

    # ---- both

    async def _tunnel(
        self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes
    ) -> None:
        async def upward() -> None:
            data = await checked(line, self._reader, first)
            await pump(self._reader, writer, self._meter, data)

        await together(self._meter, upward(), pump(reader, self._writer, self._meter))

    async def _hold(self, line: Line, writer: asyncio.StreamWriter, work: Awaitable[None]) -> None:
        """The work, as long as its line is open; what cuts it is told."""
        line.task = asyncio.current_task()
        self._outlet.lines.add(line)
        try:
            await work
        except Refused as error:
            self._failed = True
            self._outlet.attempts.note(line.target, allowed=False, why=f"cut: {error}")
        except BaseException:
            self._failed = True
            raise
        finally:
            self._outlet.lines.discard(line)
            _end(writer, abort=self._failed)


def _end(writer: asyncio.StreamWriter, *, abort: bool) -> None:
    if abort:  # by a reset: what was cut must not look complete
        if (sock := writer.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


def _authority(target: bytes) -> tuple[str, int, bytes]:
    """Of a CONNECT. Raises ValueError."""
    host, colon, port = target.decode("ascii").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError("CONNECT names no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port), b""


def _absolute(target: bytes) -> tuple[str, int, bytes]:
    """Of a plain request. Raises ValueError."""
    url = urlsplit(target.decode("ascii"))
    if url.scheme != "http" or not url.hostname:
        raise ValueError("this is a proxy: it takes http:// URLs and CONNECT")
    path = url.path or "/"
    return url.hostname, url.port or 80, f"{path}?{url.query}".encode() if url.query else path.encode()
