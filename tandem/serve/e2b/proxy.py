"""The reverse proxy: HTTP, server-sent events and WebSockets to servers inside a box.

Owns: one connection into the box per request. Refuses: to buffer a body. Invariant: an answer that broke off in the box
breaks off for the client too: it is aborted, never ended as if it were whole.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import h11
import wsproto
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from wsproto import events

from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.faults import Fault, fault_of, fault_response, port_closed

CONNECT_S = 10.0
PART_BYTES = 65536
MAX_MESSAGE_BYTES = 16 * 2**20  # of a WebSocket
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"}
_OURS = {b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token", b"x-access-token"}  # never enter a box
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pass_http(entry: Entry, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request with what the server on ``port`` answers."""
    try:
        reader, writer = await _connect(entry, port)
    except Exception as error:  # the boundary to the client
        await fault_response(fault_of(error))(scope, receive, send)
        return
    exchange = _Exchange(reader, writer, send)
    uploading = asyncio.ensure_future(exchange.upload(Request(scope, receive)))
    answering = asyncio.ensure_future(exchange.answer())
    try:
        await asyncio.wait({uploading, answering}, return_when=asyncio.FIRST_COMPLETED)
        if uploading.done() and uploading.exception() is None:
            leaving = asyncio.ensure_future(_left(receive))
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
    finally:
        for task in (uploading, answering):
            task.cancel()
            with suppress(asyncio.CancelledError, ClientDisconnect, OSError, h11.ProtocolError):
                await task
        writer.close()
    if not exchange.begun:
        fault = Fault(502, f"the server on port {port} of sandbox {entry.id} closed the connection without an answer")
        await fault_response(fault)(scope, receive, send)
    # An answer that has begun and is not whole is left as it is: the server then cuts the client's connection.


class _Exchange:
    """One request and its answer over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Send) -> None:
        self._reader, self._writer, self._send = reader, writer, send
        self._wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=256 * 1024)
        self.begun = False

    async def upload(self, request: Request) -> None:
        scope = request.scope
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [pair for pair in scope["headers"] if pair[0] not in _HOP_BY_HOP | _OURS]
        headers += [(b"connection", b"close")]
        await self._write(h11.Request(method=request.method, target=target, headers=headers))
        async for part in request.stream():
            if part:
                await self._write(h11.Data(data=part))
        await self._write(h11.EndOfMessage())

    async def answer(self) -> None:
        while True:
            event = self._wire.next_event()
            if event is h11.NEED_DATA:
                self._wire.receive_data(await self._reader.read(PART_BYTES))
            elif isinstance(event, h11.Response):
                self.begun = True
                headers = [pair for pair in event.headers.raw_items() if pair[0].lower() not in _HOP_BY_HOP]
                await self._send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await self._send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                return

    async def _write(self, event: h11.Event) -> None:
        data = self._wire.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()


async def pass_websocket(entry: Entry, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Join a client's WebSocket and one of the server on ``port``."""
    outer = WebSocket(scope, receive, send)
    try:
        reader, writer = await _connect(entry, port)
    except Exception as error:  # the boundary to the client
        await refuse_websocket(outer, fault_of(error))
        return
    try:
        joint = _Joint(outer, reader, writer)
        if not await joint.open():
            await refuse_websocket(outer, Fault(502, f"port {port} of sandbox {entry.id} takes no WebSocket here"))
            return
        tasks = {asyncio.ensure_future(joint.inward()), asyncio.ensure_future(joint.outward())}
        _, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        writer.close()


async def refuse_websocket(outer: WebSocket, fault: Fault) -> None:
    """Before it is accepted: the client sees the status of ``fault``."""
    await outer.receive()  # websocket.connect
    await outer.send_denial_response(fault_response(fault))


class _Joint:
    def __init__(self, outer: WebSocket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._outer, self._reader, self._writer = outer, reader, writer
        self._wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._held: list[str | bytes] = []
        self._held_size = 0

    async def open(self) -> bool:
        """Ask the inner server with the client's path, headers and subprotocols; False: it says no."""
        scope = self._outer.scope
        target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        target += f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        dropped = _HOP_BY_HOP | _OURS | {b"host"}
        extra = [
            pair for pair in scope["headers"] if pair[0] not in dropped and not pair[0].startswith(b"sec-websocket")
        ]
        host = self._outer.headers.get("host", "localhost")
        request = events.Request(host=host, target=target, extra_headers=extra, subprotocols=scope["subprotocols"])
        await self._write(request)
        async with asyncio.timeout(CONNECT_S):
            while True:
                for event in self._wire.events():
                    if isinstance(event, events.AcceptConnection):
                        await self._outer.accept(subprotocol=event.subprotocol)
                        return True
                    if isinstance(event, (events.RejectConnection, events.CloseConnection)):
                        return False
                data = await self._reader.read(PART_BYTES)
                if not data:
                    return False
                self._wire.receive_data(data)

    async def inward(self) -> None:
        try:
            while True:
                message = await self._outer.receive()
                if message["type"] == "websocket.disconnect":
                    await self._write(events.CloseConnection(code=message.get("code") or 1000))
                    return
                text = message.get("text")
                if text is None:
                    await self._write(events.BytesMessage(data=message.get("bytes") or b""))
                else:
                    await self._write(events.TextMessage(data=text))
        except WebSocketDisconnect:
            return

    async def outward(self) -> None:
        while True:
            for event in self._wire.events():
                match event:
                    case events.TextMessage():
                        await self._say(event.data, last=event.message_finished)
                    case events.BytesMessage():
                        await self._say(bytes(event.data), last=event.message_finished)
                    case events.Ping():
                        await self._write(event.response())
                    case events.CloseConnection():
                        code = event.code if 1000 <= event.code < 5000 and event.code not in (1005, 1006) else 1000
                        await self._outer.close(code, event.reason)
                        return
            data = await self._reader.read(PART_BYTES)
            if not data:
                await self._outer.close(1011, "the server in the sandbox went away")
                return
            self._wire.receive_data(data)

    async def _say(self, part: str | bytes, *, last: bool) -> None:
        """A message of several frames is put together: ASGI has whole messages only."""
        self._held.append(part)
        self._held_size += len(part)
        if self._held_size > MAX_MESSAGE_BYTES:
            raise Fault(413, f"a WebSocket message is larger than {MAX_MESSAGE_BYTES} bytes")
        if last:
            if isinstance(part, str):
                await self._outer.send_text("".join(str(one) for one in self._held))
            else:
                await self._outer.send_bytes(b"".join(one for one in self._held if isinstance(one, bytes)))
            self._held.clear()
            self._held_size = 0

    async def _write(self, event: events.Event) -> None:
        self._writer.write(self._wire.send(event))
        await self._writer.drain()


async def _connect(entry: Entry, port: int) -> Stream:
    try:
        async with asyncio.timeout(CONNECT_S):
            return await entry.connect(port)
    except ConnectionRefusedError:
        raise port_closed(entry.id, port) from None
    except TimeoutError:
        raise Fault(504, f"port {port} of sandbox {entry.id} took no connection in {CONNECT_S:g} s") from None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
