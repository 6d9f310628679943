"""Boxes of another server: what a lost connection is, and whose fault a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from e2b_pieces import KEY, Client, RunningServer

from tandem.config.sections.sandbox import RemoteSection, SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.core.errors import ConfigError, SandboxError, SandboxGone, SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backend import Call, CallKind, Start
from tandem.sandbox.backends.remote import RemoteBackend, Service
from tandem.sandbox.backends.remote_box import RemoteBox
from tandem.sandbox.factory import make_backend
from tandem.sandbox.manager import SandboxManager

pytestmark = pytest.mark.skipif(importlib.util.find_spec("e2b") is None, reason="E2B's SDK is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("fleet")) as running:
        yield running


class Wire:
    """The network between us and the server; ``cut`` ends all that is under way and every later connection."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._there = (place.hostname, place.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._there)
        self._writers |= {writer, far_writer}
        with contextlib.suppress(OSError):
            await asyncio.gather(_pour(reader, far_writer), _pour(far_reader, writer))


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def wired(url: str) -> AsyncIterator[tuple[Wire, RemoteBackend]]:
    wire = Wire(url)
    await wire.open()
    backend = RemoteBackend(Service(url=wire.url, key=KEY))
    try:
        yield wire, backend
    finally:
        with contextlib.suppress(SandboxError):  # nothing of it can be reached
            await backend.close()
        wire.cut()


def shell(text: str) -> Call:
    return Call(arguments=["/bin/sh", "-c", text], timeout_s=60, stdout_cap_bytes=4096, stderr_cap_bytes=4096)


def test_a_lost_connection_is_told_and_nothing_runs_twice(server: RunningServer) -> None:
    async def main() -> str:
        async with wired(server.url) as (wire, backend):
            box = await backend.create(SandboxSpec(), timeout_s=20)
            assert isinstance(box, RemoteBox)
            process = await box.start(Start(arguments=["sleep", "50"]))
            running = asyncio.ensure_future(box.call(shell("echo ran >> count; sleep 1; echo over >> count; sleep 50")))
            while (await box.call(shell("cat count 2>/dev/null"))).stdout != b"ran\n":
                await asyncio.sleep(0.02)
            wire.cut()
            with pytest.raises(SandboxGone, match="connection to .* was lost"):
                await running
            assert box.gone.done()
            with pytest.raises(SandboxGone):
                await box.call(shell("true"))
            with pytest.raises(SandboxGone):
                await process.wait()
            return box.id

    box_id = asyncio.run(main())
    with Client(server.url) as client:  # from the other side: it ran once, and nobody sent it again
        told = client.post(f"/sandboxes/{box_id}/connect", json={"timeout": 60})
        box = told.json()
        count = client.run(box, "until grep -q over count; do sleep 0.1; done; cat count", timeout_ms=9000)["stdout"]
        assert count == b"ran\nover\n"
        client.delete(f"/sandboxes/{box_id}")


def test_a_box_that_ended_at_its_service_is_gone(server: RunningServer) -> None:
    async def main() -> None:
        async with wired(server.url) as (_, backend):
            box = await backend.create(SandboxSpec(), timeout_s=20)
            assert isinstance(box, RemoteBox)
            running = asyncio.ensure_future(box.call(shell("touch began; sleep 50")))
            while b"began" not in (await box.call(shell("ls"))).stdout:
                await asyncio.sleep(0.02)
            with Client(server.url) as client:
                await asyncio.to_thread(client.delete, f"/sandboxes/{box.id}")
            with pytest.raises(SandboxGone):
                await running
            read = Call(kind=CallKind.READ, arguments=["/etc/passwd"], timeout_s=30, stdout_cap_bytes=1,
                        stderr_cap_bytes=1)  # fmt: skip
            with pytest.raises(SandboxGone):
                await box.call(read)

    asyncio.run(main())


def test_no_box_is_left_at_the_service(server: RunningServer) -> None:
    async def main() -> None:
        backend = RemoteBackend(Service(url=server.url, key=KEY))
        manager = SandboxManager(SandboxSection(warm=1), NowhereSink(), backend=backend)
        session = await manager.create(SandboxSpec())
        assert (await session.commands.run("echo well", timeout_s=30)).stdout == "well\n"
        record = await manager.snapshot(session.id)
        copy = await manager.create(SandboxSpec(), snapshot=record.id)
        assert (await copy.commands.run("ls", timeout_s=30)).exit_code == 0
        await manager.close()

    asyncio.run(main())
    with Client(server.url) as client:
        assert client.get("/v2/sandboxes").json() == []
        assert client.get("/snapshots").json() == []


def test_a_wrong_key_and_a_place_where_nobody_listens_are_told(server: RunningServer) -> None:
    async def create(service: Service) -> None:
        backend = RemoteBackend(service)
        try:
            await backend.create(SandboxSpec(), timeout_s=20)
        finally:
            await backend.close()

    with pytest.raises(SandboxUnavailable, match="no box of template"):
        asyncio.run(create(Service(url=server.url, key="e2b_" + "0" * 40)))
    with pytest.raises(SandboxError, match="no box of template"):
        asyncio.run(create(Service(url="http://127.0.0.1:9", key=KEY)))


def test_its_key_comes_by_the_name_of_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = SandboxSection(backend="remote", remote=RemoteSection(url="http://x", key_variable="MY_FLEET_KEY"))
    monkeypatch.delenv("MY_FLEET_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_FLEET_KEY"):
        make_backend(section)
    monkeypatch.setenv("MY_FLEET_KEY", "secret-words")
    backend = make_backend(section, tmp_path)
    assert backend.name == "remote" and "secret-words" not in repr(Service(key="secret-words"))
    asyncio.run(backend.close())
