"""Parts of the tests of the E2B face: a real server on loopback with real boxes, and Connect by hand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from tandem.app.sandbox_server import ServerOptions, sandbox_app
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.errors import SandboxUnavailable
from tandem.serve.server import serve_forever

KEY = "e2b_" + "7" * 40
Message = dict[str, Any]


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """``app`` on a free port of this event loop."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve_forever(app, host="127.0.0.1", port=0, on_ready=ready.set_result))
    try:
        done, _ = await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        if task in done:
            task.result()
        yield ready.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Client(httpx.Client):
    """A client of one server; ``key`` opens the control plane."""

    def __init__(self, url: str) -> None:
        super().__init__(base_url=url, headers={"X-API-Key": KEY}, timeout=20)

    def start_box(self, **asked: Any) -> Message:
        made = self.post("/v2/sandboxes", json={"timeout": 120} | asked)
        assert made.status_code == 201, made.text
        return made.json()

    def to(self, box: Message, *, port: int = 49983, user: str = "") -> dict[str, str]:
        headers = {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": str(port),
                   "X-Access-Token": box["envdAccessToken"]}  # fmt: skip
        if user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return headers

    def call(self, box: Message, method: str, message: Message) -> httpx.Response:
        return self.post(f"/{method}", json=message, headers=self.to(box))

    @contextlib.contextmanager
    def streaming(
        self, box: Message, method: str, message: Message, *, timeout_ms: int | None = None, **extra: str
    ) -> Iterator[Iterator[Message]]:
        headers = self.to(box) | {"Content-Type": "application/connect+json"} | extra
        if timeout_ms is not None:
            headers["Connect-Timeout-Ms"] = str(timeout_ms)
        with self.stream("POST", f"/{method}", content=envelope(message), headers=headers) as response:
            assert response.status_code == 200, response.read()
            yield envelopes(response)

    def run(self, box: Message, command: str, *, timeout_ms: int | None = None) -> Message:
        """A command to its end: ``stdout``, ``stderr``, ``end`` (or None) and ``error`` (or None)."""
        told: Message = {"stdout": b"", "stderr": b"", "end": None, "error": None}
        with self.streaming(box, "process.Process/Start", shell(command), timeout_ms=timeout_ms) as messages:
            for message in messages:
                note(told, message)
        return told


def shell(command: str) -> Message:
    return {"process": {"cmd": "/bin/sh", "args": ["-c", command]}}


def note(told: Message, message: Message) -> None:
    """Add what a message of a process's stream says."""
    event = message.get("event", {})
    for stream, data in event.get("data", {}).items():
        told[stream] += base64.b64decode(data)
    if "end" in event:
        told["end"] = event["end"]
    if "trailer" in message:
        told["error"] = message["trailer"].get("error")


def envelope(message: Message, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def envelopes(response: httpx.Response) -> Iterator[Message]:
    """The messages; the last is ``{"trailer": ...}``."""
    held = bytearray()
    for part in response.iter_raw():
        held += part
        while len(held) >= 5 and len(held) >= 5 + (size := int.from_bytes(held[1:5], "big")):
            flags, message = held[0], json.loads(held[5 : 5 + size])
            del held[: 5 + size]
            yield {"trailer": message} if flags & 2 else message


class RunningServer:
    """A sandbox server in a thread with an event loop of its own."""

    def __init__(self, state: Path, **section: Any) -> None:
        self.state = state
        self._options = ServerOptions(state=state, images=state / "images")
        self._section = SandboxSection(warm=0, **section)
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self.url = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self._ready.wait(30), "the server did not start"
        if isinstance(self._error, SandboxUnavailable):
            pytest.skip(self._error.message)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not end"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with sandbox_app(self._section, self._options, (KEY,)) as app, serving(app) as self.url:
                self._ready.set()
                await self._stop.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("state")) as running:
        with Client(running.url) as client:
            made = client.post("/sandboxes", json={"timeout": 30})
            if made.status_code != 201:
                pytest.skip(f"this machine makes no boxes: {made.text}")
            client.delete(f"/sandboxes/{made.json()['sandboxID']}")
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made


@pytest.fixture(scope="module")
def box(server: RunningServer) -> Iterator[Message]:
    """One box for all tests of a module."""
    with Client(server.url) as made:
        box = made.start_box()
        yield box
        made.delete(f"/sandboxes/{box['sandboxID']}")
