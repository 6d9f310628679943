"""Servers in real boxes, through the reverse proxy: who is let in, events as they come, WebSockets, a paused box."""

import socket
import textwrap
import time
from collections.abc import Iterator

import httpx
import pytest
import wsproto
from e2b_pieces import Client, Message
from wsproto import events

PORT = 8765
# One thread a connection, with what a box has: events with a pause between them, or an echo over a WebSocket.
SERVER = """
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
        "/files", params={"path": "server.py"}, content=textwrap.dedent(SERVER).encode(), headers=client.to(made)
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
