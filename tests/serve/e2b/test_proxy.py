"""The reverse proxy: with a real server in the place of one inside a box, and with servers in real boxes."""

import asyncio
import contextlib
import socket
import textwrap
import time
from collections.abc import Iterator

import httpx
import pytest
import wsproto
from e2b_pieces import Client, Message, serving
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


# ---- in real boxes
PORT = 8765
# One thread a connection, with what a box has: events with a pause between them, or an echo over a WebSocket.
IN_BOX = """
    import base64, hashlib, http.server, time

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if self.headers.get("Upgrade"):
                return self.echo()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for number in range(3):
                token = self.headers.get("E2b-Traffic-Access-Token")
                self.wfile.write(f"data: {self.path} {number} {token}\\n\\n".encode())
                self.wfile.flush()
                time.sleep(0.2)
            self.close_connection = True

        def echo(self):
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
            self.end_headers()
            head = self.rfile.read(2)
            mask = self.rfile.read(4)
            words = bytes(each ^ mask[n % 4] for n, each in enumerate(self.rfile.read(head[1] & 127)))
            self.wfile.write(bytes([0x81, 2 * len(words)]) + 2 * words)
            self.wfile.flush()
            self.close_connection = True

        def log_message(self, *words): pass

    http.server.ThreadingHTTPServer(("127.0.0.1", 8765), Handler).serve_forever()
"""


@pytest.fixture
def served(client: Client) -> Iterator[Message]:
    """A box whose ports are private, with a server in it; used while it is paused it goes on."""
    made = client.start_box(network={"allowPublicTraffic": False}, autoPause=True, autoResume={"enabled": True})
    client.post(
        "/files", params={"path": "server.py"}, content=textwrap.dedent(IN_BOX).encode(), headers=client.to(made)
    )
    told = client.run(made, "command -v python3 && (setsid python3 ~/server.py > ~/log 2>&1 < /dev/null &)")
    if not told["stdout"]:
        pytest.skip("no python3 in the box")
    deadline = time.monotonic() + 20
    while client.get("/", headers=through(client, made)).status_code != 200:
        assert time.monotonic() < deadline, client.run(made, "cat ~/log")["stdout"]
        time.sleep(0.1)
    yield made
    client.delete(f"/sandboxes/{made['sandboxID']}")


def through(client: Client, box: Message, token: str = "") -> dict[str, str]:
    return client.to(box, port=PORT) | {"E2B-Traffic-Access-Token": token or box["trafficAccessToken"]}


def test_a_private_port_opens_by_the_boxs_token_or_its_own(client: Client, served: Message):
    one = f"/sandboxes/{served['sandboxID']}/ports"
    token = client.get(f"{one}/{PORT}").json()["trafficAccessToken"]
    other = client.get(f"{one}/{PORT + 1}").json()["trafficAccessToken"]
    answer = client.get("/x", headers=through(client, served, token))
    assert answer.status_code == 200 and answer.text.startswith("data: /x 0 None"), "no token enters the box"
    for wrong in ("x", other, served["envdAccessToken"]):
        assert client.get("/", headers=through(client, served, wrong)).status_code == 403
    elsewhere = client.to(served, port=PORT + 1) | {"E2B-Traffic-Access-Token": token}
    assert client.get("/", headers=elsewhere).status_code == 403
    for wrong in ("0", "65536", "x"):
        assert client.get(f"{one}/{wrong}").status_code == 400
    assert httpx.get(f"{client.base_url}{one}/{PORT}").status_code == 401


def test_events_come_one_by_one_by_host_name_too(client: Client, served: Message):
    host = f"{PORT}-{served['sandboxID']}.box.test"
    headers = {"Host": host, "E2B-Traffic-Access-Token": served["trafficAccessToken"]}
    times = []
    with client.stream("GET", "/tick", headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
        for line in answer.iter_lines():
            if line:
                times.append(time.monotonic())
    assert len(times) == 3 and times[2] - times[0] > 0.3, "they were held back"


def test_a_websocket_reaches_the_server_of_a_box(client: Client, served: Message):
    connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    headers = [(name.encode(), value.encode()) for name, value in through(client, served).items()]
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as wire:
        wire.sendall(connection.send(events.Request(host="box", target="/socket", extra_headers=headers)))
        found: list[events.Event] = []
        while not any(isinstance(event, events.TextMessage | events.CloseConnection) for event in found):
            data = wire.recv(4096)
            assert data, found
            connection.receive_data(data)
            for event in connection.events():
                found.append(event)
                if isinstance(event, events.AcceptConnection):
                    wire.sendall(connection.send(events.TextMessage(data="ab")))
    assert [event.data for event in found if isinstance(event, events.TextMessage)] == ["abab"]


def test_a_paused_box_goes_on_when_a_port_is_used(client: Client, served: Message):
    path = f"/sandboxes/{served['sandboxID']}"
    assert client.post(f"{path}/pause", json={}).status_code == 204
    assert client.get("/after", headers=through(client, served)).text.startswith("data: /after 0")
    assert client.get(path).json()["state"] == "running"
