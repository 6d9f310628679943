"""The reverse proxy, with a real server in the place of one inside a box."""

import asyncio
import contextlib

import httpx
import pytest
import wsproto
from e2b_pieces import serving
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from wsproto import events

from tandem.serve.e2b import proxy


class Inside:
    """As an entry: ``connect`` leads to a server of this machine."""

    id = "box"

    def __init__(self, ports):
        self.ports = ports

    async def connect(self, port):
        return await asyncio.open_connection("127.0.0.1", self.ports.get(port, 1))


async def told(request):
    body = await request.body()
    shown = {"method": request.method, "path": str(request.url.path), "query": request.url.query}
    shown |= {"body": body.decode(), "headers": dict(request.headers)}
    return JSONResponse(shown, headers={"X-Inner": "yes"})


async def ticks(request):
    async def parts():
        for number in range(3):
            yield f"data: {number}\n\n"
            await asyncio.sleep(0.05)

    return StreamingResponse(parts(), media_type="text/event-stream")


async def echo(socket):
    await socket.accept(subprotocol=(socket.scope["subprotocols"] or [None])[0])
    with contextlib.suppress(Exception):
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if message.get("text") == "end":
                await socket.close(4001, "asked to")
                return
            if message.get("text") is not None:
                await socket.send_text(message["text"] * 2)
            else:
                await socket.send_bytes(message["bytes"] * 2)


INNER = Starlette(routes=[
    Route("/told/{rest:path}", told, methods=["GET", "POST", "DELETE"]), Route("/ticks", ticks),
    WebSocketRoute("/ws", echo),
])  # fmt: skip


def over(work):
    """Run ``work(url, client)`` with the proxy in front of the inner server, its port 80 in the "box"."""

    async def torn(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.close()

    async def silent(reader, writer):
        writer.close()

    async def main():
        async with serving(INNER) as inner:
            broken = await asyncio.start_server(torn, "127.0.0.1", 0)
            mute = await asyncio.start_server(silent, "127.0.0.1", 0)
            ports = {80: int(inner.rpartition(":")[2]), 81: broken.sockets[0].getsockname()[1],
                     82: mute.sockets[0].getsockname()[1]}  # fmt: skip
            entry = Inside(ports)

            async def app(scope, receive, send):
                port = 80
                for name, value in scope["headers"]:
                    port = int(value) if name == b"x-port" else port
                if scope["type"] == "websocket":
                    await proxy.pass_websocket(entry, port, scope, receive, send)
                else:
                    await proxy.pass_http(entry, port, scope, receive, send)

            async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
                await work(url, client)
            broken.close()
            mute.close()

    asyncio.run(main())


def test_a_request_goes_through_as_it_is_without_our_tokens():
    async def work(url, client):
        answer = await client.post("/told/a%20b?x=1&y=%26", content=b"body" * 5000, headers={
            "X-Own": "v", "E2B-Traffic-Access-Token": "secret", "X-Access-Token": "secret"})  # fmt: skip
        shown = answer.json()
        assert (shown["method"], shown["path"], shown["query"]) == ("POST", "/told/a b", "x=1&y=%26")
        assert shown["body"] == "body" * 5000 and shown["headers"]["x-own"] == "v"
        assert answer.headers["x-inner"] == "yes" and "secret" not in answer.text
        assert (await client.delete("/told/x")).json()["method"] == "DELETE"
        assert (await client.get("/nothing")).status_code == 404

    over(work)


def test_events_come_as_they_are_made():
    async def work(url, client):
        async with client.stream("GET", "/ticks") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            parts = [part async for part in response.aiter_text()]
        assert "".join(parts) == "data: 0\n\ndata: 1\n\ndata: 2\n\n" and len(parts) > 1

    over(work)


def test_an_answer_that_breaks_off_is_aborted():
    async def work(url, client):
        async with client.stream("GET", "/x", headers={"X-Port": "81"}) as response:
            heard = b""
            with pytest.raises(httpx.RemoteProtocolError):
                async for part in response.aiter_bytes():
                    heard += part
        assert heard == b"hello"
        mute = await client.get("/x", headers={"X-Port": "82"})
        assert mute.status_code == 502 and "without an answer" in mute.json()["message"]
        closed = await client.get("/x", headers={"X-Port": "83"})
        assert closed.status_code == 502 and "port is not open" in closed.json()["message"]

    over(work)


class Socket:
    """A WebSocket client of a few lines."""

    async def open(self, url, target, **words):
        host, _, port = url.rpartition("/")[2].partition(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        self.wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self.seen = []
        await self.say(events.Request(host=host, target=target, **words))
        return await self.hear()

    async def say(self, event):
        self.writer.write(self.wire.send(event))
        await self.writer.drain()

    async def hear(self):
        while not self.seen:
            self.wire.receive_data(await asyncio.wait_for(self.reader.read(65536), 30) or None)
            self.seen += self.wire.events()
        return self.seen.pop(0)


def test_websockets():
    async def work(url, client):
        socket = Socket()
        opened = await socket.open(url, "/ws", subprotocols=["chat"])
        assert isinstance(opened, events.AcceptConnection) and opened.subprotocol == "chat"
        await socket.say(events.TextMessage(data="ab"))
        assert (await socket.hear()).data == "abab"
        await socket.say(events.BytesMessage(data=b"\0" * 70_000))
        data = b""
        while len(data) < 140_000:
            data += (await socket.hear()).data
        assert data == b"\0" * 140_000
        await socket.say(events.TextMessage(data="end"))
        closed = await socket.hear()
        assert (closed.code, closed.reason) == (4001, "asked to")
        socket.writer.close()

    over(work)


def test_a_websocket_that_is_refused_has_a_status():
    async def work(url, client):
        for target, port, status in (("/ws", "83", 502), ("/nothing", "80", 502)):
            socket = Socket()
            refused = await socket.open(url, target, extra_headers=[(b"x-port", port.encode())])
            assert isinstance(refused, events.RejectConnection) and refused.status_code == status
            socket.writer.close()

    over(work)
