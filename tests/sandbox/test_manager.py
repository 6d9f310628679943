from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from folderbox import FolderBackend

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import NetworkPolicy, SandboxSpec, SandboxState
from tandem.core.errors import PluginError, SandboxGone, SandboxUnavailable, SnapshotCorrupt, SnapshotError
from tandem.core.events import AnyEvent, SandboxCreated, SandboxFailed, SandboxKilled
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.abilities import Ability
from tandem.sandbox.audit import read
from tandem.sandbox.backend import Start
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager, spec_of
from tandem.sandbox.records import Life


class ListSink:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def put_blob(self, data: bytes) -> str:
        raise NotImplementedError("boxes store no blobs")


def test_the_recipe_becomes_a_spec() -> None:
    section = SandboxSection(memory_mb=64, cpus=0.5, pids=9, disk_mb=3, output_kb=2, lifetime_s=7.0)
    limits = spec_of(section).limits
    assert (limits.memory_bytes, limits.cpus, limits.pids) == (64 * 2**20, 0.5, 9)
    assert (limits.disk_bytes, limits.output_bytes, limits.lifetime_s) == (3 * 2**20, 2048, 7.0)


def test_events_tell_each_life_and_failure() -> None:
    async def main() -> list[AnyEvent]:
        sink = ListSink()
        manager = SandboxManager(SandboxSection(), sink)
        await manager.check(SandboxSpec())
        assert not sink.events
        first, second = await manager.create(SandboxSpec()), await manager.create(SandboxSpec())
        assert list(manager.live) == [first.id, second.id] and first.id != second.id
        await first.kill()
        with pytest.raises(SandboxUnavailable):
            await manager.create(SandboxSpec(template="moon"))
        await manager.close()
        await manager.close()
        assert not manager.live
        return sink.events

    created, also, killed, failed, last = asyncio.run(main())
    assert isinstance(created, SandboxCreated) and isinstance(also, SandboxCreated)
    assert created.backend == "namespace" and 0 < created.create_s < 10
    assert isinstance(killed, SandboxKilled) and killed.sandbox_id == created.sandbox_id
    assert isinstance(failed, SandboxFailed) and failed.error == "SandboxUnavailable" and "moon" in failed.detail
    assert isinstance(last, SandboxKilled) and last.sandbox_id == also.sandbox_id


def test_warm_boxes_answer_leases_and_go_at_close() -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(warm=2), ListSink())
        boxes = [await manager.create(SandboxSpec()) for _ in range(5)]
        results = await asyncio.gather(*(box.commands.run("echo $$ > /tmp/me; ls /tmp | wc -l", timeout_s=30)
                                         for box in boxes))
        assert {result.stdout for result in results} == {"1\n"}
        await manager.close()

    asyncio.run(main())


def test_an_impossible_box_is_known_at_the_check() -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(), ListSink())
        with pytest.raises(SandboxUnavailable, match="set host name") as caught:
            await manager.check(SandboxSpec(hostname="x" * 99))
        assert "doctor" in caught.value.hint
        await manager.close()

    asyncio.run(main())


def test_boxes_are_listed_by_metadata_and_state_in_pages(tmp_path: Path) -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(warm=0), ListSink(), backend=FolderBackend(tmp_path, processes=False))
        made = [
            (await manager.create(SandboxSpec(), life=Life(metadata={"odd": str(number % 2), "n": str(number)}))).id
            for number in range(7)
        ]
        await manager.pause(made[3])
        odd = manager.boxes(metadata={"odd": "1"}).boxes
        assert [record.id for record in odd] == [made[1], made[3], made[5]]
        assert [record.id for record in manager.boxes(states=[SandboxState.PAUSED]).boxes] == [made[3]]
        assert manager.boxes(metadata={"odd": "1", "n": "2"}).boxes == []
        seen, after = [], ""
        while True:
            page = manager.boxes(limit=3, after=after)
            seen += [record.id for record in page.boxes]
            after = page.next
            if len(seen) == 3:
                await manager.kill(made[2])  # the last of the page ends: the next page begins where it did
            if not after:
                break
        assert seen == made
        with pytest.raises(ValueError, match="no page"):
            manager.boxes(after="moon")
        await manager.close()

    asyncio.run(main())


def test_a_box_has_a_log_and_the_dead_are_unknown(tmp_path: Path) -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(warm=0), ListSink(), backend=FolderBackend(tmp_path, processes=False))
        session = await manager.create(SandboxSpec())
        await manager.pause(session.id)
        await manager.resume(session.id)
        manager.log(session.id, "out of cheese", level="error", code="7")
        lines = manager.logs(session.id)
        assert [line.message for line in lines] == ["created", "pause warm", "resume", "out of cheese"]
        assert lines[3].fields == {"code": "7"} and manager.logs(session.id, since=lines[3].time, limit=1)
        await manager.kill(session.id)
        for ask in (manager.get, manager.logs, manager.session):
            with pytest.raises(SandboxGone, match="there is no sandbox"):
                ask(session.id)
        await manager.close()

    asyncio.run(main())


def test_every_verb_is_in_the_audit_log_with_who_asked(tmp_path: Path) -> None:
    async def main() -> None:
        backend = FolderBackend(tmp_path / "boxes", processes=False)
        manager = SandboxManager(SandboxSection(warm=0), ListSink(), backend=backend, state=tmp_path / "state")
        session = await manager.create(SandboxSpec())
        await manager.pause(session.id, actor="key one")
        with pytest.raises(SandboxUnavailable, match="network"):
            await manager.set_network(session.id, NetworkPolicy(allow=("10.0.0.1:80",)), actor="key one")
        with pytest.raises(SandboxUnavailable, match="network"):
            await manager.create(SandboxSpec(network=NetworkPolicy(internet=True)))
        await manager.kill(session.id, actor="key two")
        await manager.close()

    asyncio.run(main())
    lines = list(read(tmp_path / "state" / "audit"))
    assert [(line.action, line.actor) for line in lines if line.action != "create"][:3] == [
        ("pause", "key one"), ("network", "key one"), ("kill", "key two")
    ]
    assert lines[2].detail == {"internet": "False", "allow": "10.0.0.1:80"}


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="'namespaces'") as caught:
        SandboxManager(SandboxSection(backend="namespaces"), ListSink())
    assert "namespace" in caught.value.hint


# ---- faults of real boxes: a typed error within its deadline, what was said before it is kept, nothing is done twice


def served(tmp_path: Path, work: Callable[[SandboxManager], Awaitable[None]], *, store: str = "") -> None:
    async def main() -> None:
        backend = NamespaceBackend(state_folder=tmp_path)
        manager = SandboxManager(
            SandboxSection(warm=0), NowhereSink(), backend=backend, state=tmp_path, store=store
        )
        await manager.open()
        try:
            async with asyncio.timeout(30):
                await work(manager)
        finally:
            await manager.close()

    asyncio.run(main())


def test_namespaces_a_corrupt_snapshot_is_named_and_makes_no_box(tmp_path: Path) -> None:
    async def work(manager: SandboxManager) -> None:
        session = await manager.create(SandboxSpec())
        await session.files.write("name", "good")
        taken = await manager.snapshot(session.id, name="base")
        (blob,) = taken.blobs()
        (path,) = [each for each in (tmp_path / "blobs").rglob(blob) if each.is_file()]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "layers" / blob)  # the unpacked copy, as after a restart of the machine
        with pytest.raises(SnapshotCorrupt, match=blob):
            await manager.create(SandboxSpec(), snapshot="base")
        assert list(manager.live) == [session.id]
        assert await session.files.read("name") == b"good"

    served(tmp_path, work)


def test_namespaces_a_full_store_leaves_the_box_as_it_was(tmp_path: Path, small_disk: Path) -> None:
    async def work(manager: SandboxManager) -> None:
        session = await manager.create(SandboxSpec())
        await session.files.write("big", os.urandom(2_000_000))
        with pytest.raises(SnapshotError, match="full"):
            await manager.snapshot(session.id)
        assert session.state is SandboxState.RUNNING and not manager.snapshots.kept()
        assert len(await session.files.read("big")) == 2_000_000
        assert [child.error for child in await manager.fork(session.id, 1)] == [None]  # in memory it goes on

    served(tmp_path / "state", work, store=str(small_disk / "blobs"))


@pytest.mark.parametrize("how", ["running", "paused"])
def test_namespaces_a_dead_agent_ends_its_calls_and_its_box(tmp_path: Path, how: str) -> None:
    async def work(manager: SandboxManager) -> None:
        session = await manager.create(SandboxSpec())
        heard: list[bytes] = []
        call = asyncio.ensure_future(session.commands.run(
            "echo once >> count; echo before; sleep 60", timeout_s=60, on_stdout=heard.append
        ))
        while not heard:
            await asyncio.sleep(0.01)
        if how == "paused":
            await manager.pause(session.id)
        assert session.box is not None and isinstance(manager.backend, NamespaceBackend)
        os.kill(manager.backend.keeper.pids[int(session.box.handle)], signal.SIGKILL)
        with pytest.raises(SandboxGone, match=session.id):
            await call
        assert b"".join(heard) == b"before\n"
        assert session.state is SandboxState.DEAD and not manager.live
        with pytest.raises(SandboxGone):
            await manager.pause(session.id)
        assert (await (await manager.create(SandboxSpec())).commands.run("echo on", timeout_s=20)).stdout == "on\n"

    served(tmp_path, work)


def test_namespaces_a_command_past_its_deadline_ends_with_its_children_and_keeps_its_output(tmp_path: Path) -> None:
    async def work(manager: SandboxManager) -> None:
        session = await manager.create(SandboxSpec())
        line = "echo once >> count; echo said; setsid sh -c 'echo child; sleep 60' & (sleep 60 &) ; sleep 60"
        late = await session.commands.run(line, timeout_s=0.5)
        assert late.timed_out and late.exit_code is None and sorted(late.stdout.split()) == ["child", "said"]
        left = await session.commands.run("cat count; ps -e -o comm= | grep -c sleep", timeout_s=20)
        assert left.stdout == "once\n0\n"

    served(tmp_path, work)


def test_namespaces_a_caller_that_leaves_takes_its_command_along(tmp_path: Path) -> None:
    async def work(manager: SandboxManager) -> None:
        session = await manager.create(SandboxSpec())
        heard: list[bytes] = []
        call = asyncio.ensure_future(session.commands.run(
            "echo once >> count; while :; do echo tick; sleep 0.01; done", timeout_s=60, on_stdout=heard.append
        ))
        while not heard:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(500):
            seen = await session.commands.run("cat count; ps -e -o comm= | grep -c -x sh", timeout_s=20)
            if seen.stdout == "once\n1\n":  # the shell that looks
                return
        raise AssertionError(seen.stdout)

    served(tmp_path, work)


@pytest.mark.parametrize("live", [False, True])
def test_every_child_has_a_host_name_of_its_own(live: bool) -> None:
    async def main() -> list[str]:
        manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=NamespaceBackend())
        try:
            parent = await manager.create(SandboxSpec())
            if live and Ability.LIVE_FORK not in manager.backend.abilities:
                pytest.skip("no live fork here")
            if live:
                box = await parent.use()
                shell = await box.start(Start(arguments=["/bin/sh"], stdin=True))
                await shell.send_stdin(b"echo ready\n")
                await anext(aiter(shell.output(from_start=True)))
            children = []
            for count in (2, 1):
                children += [child.session for child in await manager.fork(parent.id, count, live=live)]
            names = []
            for session in (parent, *children):
                assert session is not None
                result = await session.commands.run("hostname", timeout_s=10)
                names.append(result.stdout.strip())
            return names
        finally:
            await manager.close()

    assert asyncio.run(main()) == ["box", "box-1", "box-2", "box-3"]
