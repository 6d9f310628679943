"""Networks of real boxes: through every verb, and a restart of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from box_pieces import SPEC
from network_pieces import Table, server

from tandem.config.sections.sandbox import NetworkSection, SandboxSection
from tandem.core.boxes import NetworkPolicy
from tandem.core.errors import ConfigError, SandboxError, SandboxUnavailable
from tandem.core.events import AnyEvent, SandboxRefused
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.abilities import Ability
from tandem.sandbox.audit import read
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager, spec_of
from tandem.sandbox.network.names import Names
from tandem.sandbox.reach import Bound, unbounded
from tandem.sandbox.records import PauseMode
from tandem.sandbox.session import Session

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
ASK = "import urllib.request as u; print(u.urlopen('http://a.org:{port}/', timeout=9).read().decode())"


class ListSink(NowhereSink):
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        self.events.append(event)
        return len(self.events) - 1


def allowing(*rules: str) -> NetworkPolicy:
    return NetworkPolicy(allow=rules, private=("127.0.0.1",))


@contextlib.asynccontextmanager
async def manager(state: Path, *, bound: Bound = unbounded, leaves: bool = False) -> AsyncIterator[SandboxManager]:
    """``leaves``: the next one takes up its boxes."""
    backend = NamespaceBackend(state_folder=state, names=Names(Table(a_org=["127.0.0.1"])))
    made = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend, state=state, bound=bound)
    await made.open()
    try:
        yield made
    finally:
        await (made.leave() if leaves else made.close())


async def made(boxes: SandboxManager, policy: NetworkPolicy) -> Session:
    try:
        return await boxes.create(replace(SPEC, network=policy))
    except SandboxUnavailable as error:
        pytest.skip(f"no boxes here: {error.message}")


async def ask(box: Session, port: int) -> str:
    result = await box.commands.run(["python3", "-c", ASK.format(port=port)], timeout_s=20)
    return result.stdout.strip() or result.stderr.strip().splitlines()[-1]


def in_boxes(state: Path, work: Callable[[SandboxManager, int], Awaitable[None]]) -> None:
    async def main() -> None:
        async with server(ANSWER) as (port, _), manager(state) as boxes:
            await work(boxes, port)

    asyncio.run(main())


def test_default_deny_then_a_policy_then_none_again(tmp_path: Path) -> None:
    async def work(boxes: SandboxManager, port: int) -> None:
        box = await made(boxes, NetworkPolicy())
        assert "refused" in await ask(box, port) or "resolution" in await ask(box, port)
        await boxes.set_network(box.id, allowing(f"a.org:{port}"))
        assert await ask(box, port) == "hi" and "403" in await ask(box, port + 1)
        assert boxes.get(box.id).spec.network.allow == (f"a.org:{port}",)
        names = await box.commands.run("getent hosts a.org; getent hosts b.org", timeout_s=20)
        assert names.stdout.split() == ["127.0.0.1", "a.org"]
        await boxes.set_network(box.id, NetworkPolicy())
        assert await ask(box, port) != "hi"
        with pytest.raises(ConfigError):
            await boxes.set_network(box.id, allowing("127.1"))
        assert any(line.message == "connection refused" for line in boxes.logs(box.id))

    in_boxes(tmp_path / "s", work)
    lines = [line for line in read(tmp_path / "s" / "audit") if line.action == "connect"]
    assert {line.detail["allowed"] for line in lines if line.detail["target"].startswith("a.org")} == {"True", "False"}
    low = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    assert low.read_text() != "0\n" or Path("/proc/self/uid_map").read_text().split()[0] != "0"


def test_a_policy_lives_through_pause_snapshot_and_fork(tmp_path: Path) -> None:
    async def work(boxes: SandboxManager, port: int) -> None:
        box = await made(boxes, allowing("a.org"))
        await boxes.pause(box.id)
        await boxes.set_network(box.id, NetworkPolicy())  # of a paused box, too
        await boxes.set_network(box.id, allowing("a.org"))
        await boxes.resume(box.id)
        assert await ask(box, port) == "hi"
        if Ability.SNAPSHOT not in boxes.backend.abilities:
            pytest.skip("no layers on this kernel")
        await boxes.pause(box.id, mode=PauseMode.FILES)
        await boxes.resume(box.id)
        assert await ask(box, port) == "hi"
        (child,) = await boxes.fork(box.id, 1)
        assert child.session is not None and await ask(child.session, port) == "hi"
        await boxes.set_network(child.session.id, NetworkPolicy())
        assert await ask(child.session, port) != "hi" and await ask(box, port) == "hi"

    in_boxes(tmp_path / "s", work)


def test_live_copies_have_a_network_of_their_own(tmp_path: Path) -> None:
    async def work(boxes: SandboxManager, port: int) -> None:
        if Ability.LIVE_FORK not in boxes.backend.abilities:
            pytest.skip("no live fork here")
        box = await made(boxes, allowing("a.org"))
        python = await box.commands.start(["python3", "-i", "-q"])
        await python.send_stdin(b"kept = 1\n")
        first, second = [child.session for child in await boxes.fork(box.id, 2, live=True)]
        assert first is not None and second is not None and await ask(first, port) == "hi"
        await boxes.set_network(first.id, NetworkPolicy())
        assert await ask(first, port) != "hi" and await ask(second, port) == "hi" and await ask(box, port) == "hi"

    in_boxes(tmp_path / "s", work)


def test_the_next_server_takes_up_policies_within_its_own_bound(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(ANSWER) as (port, _):
            async with manager(tmp_path / "s", leaves=True) as boxes:
                running, paused = await made(boxes, allowing("a.org")), await made(boxes, allowing("a.org"))
                await boxes.pause(paused.id)
            async with manager(tmp_path / "s", leaves=True) as boxes:
                assert set(boxes.live) == {running.id, paused.id}
                assert await ask(boxes.session(running.id), port) == "hi"
                await boxes.resume(paused.id)
                assert await ask(boxes.session(paused.id), port) == "hi"
            async with manager(tmp_path / "s", bound=lambda policy: replace(policy, never=("a.org",))) as boxes:
                assert "403" in await ask(boxes.session(running.id), port)

    asyncio.run(main())


def test_the_budget_of_bytes_outlives_policies_and_servers(tmp_path: Path) -> None:
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 6000\r\n\r\n" + b"x" * 6000
    policy = replace(allowing("a.org"), total_bytes=10_000)

    async def main() -> None:
        async with server(long) as (port, _):
            async with manager(tmp_path / "s", leaves=True) as boxes:
                box = await made(boxes, policy)
                assert await ask(box, port) == "x" * 6000
                counted = boxes.get(box.id).network_bytes  # before it may be needed: a killed server lost none
                assert 6000 <= counted < 7500
            async with manager(tmp_path / "s", leaves=True) as boxes:
                assert 6000 <= boxes.get(box.id).network_bytes <= counted
                await boxes.set_network(box.id, NetworkPolicy())
                await boxes.set_network(box.id, policy)
                assert await ask(boxes.session(box.id), port) != "x" * 6000
                assert boxes.get(box.id).network_bytes > 6000
            async with manager(tmp_path / "s") as boxes:
                assert "403" in await ask(boxes.session(box.id), port)

    asyncio.run(main())


@pytest.mark.parametrize("state", [False, True])
def test_a_refused_connection_is_an_event(tmp_path: Path, state: bool) -> None:
    async def main() -> None:
        sink = ListSink()
        backend = NamespaceBackend(names=Names(Table(a_org=["127.0.0.1"])))
        boxes = SandboxManager(SandboxSection(warm=0), sink, backend=backend, state=tmp_path / "s" if state else None)
        await boxes.open()
        try:
            async with server(ANSWER) as (port, _):
                box = await made(boxes, allowing(f"a.org:{port}"))
                assert await ask(box, port) == "hi" and "403" in await ask(box, port + 1)
        finally:
            await boxes.close()
        refused = [event for event in sink.events if isinstance(event, SandboxRefused)]
        assert {(event.sandbox_id, event.target, event.suppressed) for event in refused} == {
            (box.id, f"a.org:{port + 1}", 0)
        }
        assert "no rule allows it" in refused[0].why

    asyncio.run(main())


def test_a_taken_port_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    async def work(boxes: SandboxManager, port: int) -> None:
        box = await made(boxes, NetworkPolicy())
        listener = "import socket, time\ns = socket.create_server(('127.0.0.1', 3128))\nopen('up', 'w')\ntime.sleep(60)"
        held = asyncio.create_task(box.commands.run(["python3", "-c", listener], timeout_s=60))
        while "up" not in await box.files.list("."):
            await asyncio.sleep(0.05)
        with pytest.raises(SandboxError, match="cannot listen") as caught:
            await boxes.set_network(box.id, allowing("a.org"))
        assert "3128" in caught.value.hint and boxes.get(box.id).spec.network.none
        await boxes.kill(box.id)
        with contextlib.suppress(SandboxError):
            await held

    in_boxes(tmp_path / "s", work)


def test_a_recipes_addresses_are_its_operators() -> None:
    section = SandboxSection(network=NetworkSection(allow=("10.0.0.5:5432", "a.org"), connections=3, total_mb=1))
    policy = spec_of(section).network
    assert policy.private == policy.allow and policy.connections == 3 and policy.total_bytes == 2**20
    with pytest.raises(ConfigError, match="sandbox.network.deny.*127.1"):
        spec_of(SandboxSection(network=NetworkSection(deny=("127.1",))))
