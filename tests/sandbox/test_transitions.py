from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from folderbox import FolderBackend, stopped

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable, SnapshotError
from tandem.core.events import AnyEvent, SandboxMoved
from tandem.sandbox.abilities import Ability
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import Life, OnTimeout, PauseMode

SPEC = SandboxSpec()


class ListSink:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def put_blob(self, data: bytes) -> str:
        raise NotImplementedError


def run(
    folder: Path, test: Callable[[SandboxManager, FolderBackend], Awaitable[None]], *, state: bool = True
) -> list[AnyEvent]:
    """A test with a manager and its backend; afterwards nothing is left."""

    async def main() -> list[AnyEvent]:
        sink, backend = ListSink(), FolderBackend(folder / "backend")
        manager = SandboxManager(
            SandboxSection(warm=0), sink, backend=backend, state=folder / "state" if state else None
        )
        await manager.open()
        try:
            async with asyncio.timeout(30):
                await test(manager, backend)
        finally:
            backend.go_on.set()
            backend.faults.clear()
            await manager.close()
        assert not manager.live and not backend.boxes and backend.num_frozen == 0
        assert not list((folder / "backend" / "boxes").iterdir())
        return sink.events

    return asyncio.run(main())


@pytest.mark.parametrize("state", [False, True])
def test_pause_and_resume_stop_and_start_the_processes(tmp_path: Path, state: bool) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        (box,) = backend.boxes.values()
        assert await manager.pause(session.id)
        assert stopped(box.pid) and session.state is SandboxState.PAUSED
        assert manager.get(session.id).deadline is None
        assert not await manager.pause(session.id) and not await manager.pause(session.id, mode=PauseMode.COLD)
        with pytest.raises(SandboxError, match="is paused, not running"):
            await session.files.read("x")
        assert await manager.resume(session.id, lifetime_s=60)
        assert not stopped(box.pid) and not await manager.resume(session.id)
        assert (deadline := manager.get(session.id).deadline) and deadline > manager.get(session.id).started_at + 59
        await session.files.write("x", "1")

    events = run(tmp_path, test, state=state)
    assert [event.verb for event in events if isinstance(event, SandboxMoved)] == ["pause warm", "resume"]


@pytest.mark.parametrize("state", [False, True])
def test_a_box_paused_with_its_files_only_costs_no_process_and_comes_back(tmp_path: Path, state: bool) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC, life=Life(auto_resume=True))
        for text in ("one", "two"):
            await session.files.write("kept", text)
            assert await manager.pause(session.id, mode=PauseMode.FILES)
            assert not backend.boxes and session.state is SandboxState.PAUSED
            assert await session.files.read("kept") == text.encode()  # used, so it runs again
            assert session.state is SandboxState.RUNNING and not manager.snapshots.kept()
        await manager.pause(session.id, mode=PauseMode.FILES)
        assert await manager.kill(session.id) and session.state is SandboxState.DEAD
        assert not await manager.kill(session.id)

    run(tmp_path, test, state=state)


def test_a_failed_pause_leaves_the_box_running_and_a_failed_way_back_ends_it(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        (box,) = backend.boxes.values()
        backend.faults["pause"] = RuntimeError("no freezer")
        with pytest.raises(SandboxError, match=r"its backend failed: RuntimeError: no freezer"):
            await manager.pause(session.id)
        assert session.state is SandboxState.RUNNING and not stopped(box.pid)
        assert manager.get(session.id).intent == ""
        backend.faults["resume"] = RuntimeError("no way back")
        with pytest.raises(SandboxError, match="no freezer"):
            await manager.pause(session.id)
        assert session.state is SandboxState.DEAD and box.gone.done()
        with pytest.raises(SandboxGone):
            await manager.pause(session.id)

    run(tmp_path, test)


def test_memory_that_is_not_given_back_is_said_by_type_and_the_box_stays_paused(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        await manager.pause(session.id)
        backend.faults["pause"] = RuntimeError("no swap")
        with pytest.raises(SandboxError, match=r"its backend failed: RuntimeError: no swap"):
            await manager.pause(session.id, mode=PauseMode.COLD)
        assert session.state is SandboxState.PAUSED
        backend.faults.clear()
        assert await manager.resume(session.id)

    run(tmp_path, test)


def test_a_failed_resume_stays_paused(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        warm, files = await manager.create(SPEC), await manager.create(SPEC)
        await files.files.write("x", "1")
        await manager.pause(warm.id)
        await manager.pause(files.id, mode=PauseMode.FILES)
        backend.faults["resume"] = backend.faults["create"] = SandboxError("not now")
        for session in (warm, files):
            with pytest.raises(SandboxError, match="not now"):
                await manager.resume(session.id)
            assert session.state is SandboxState.PAUSED
        backend.faults.clear()
        assert await manager.resume(warm.id) and await manager.resume(files.id)
        assert await files.files.read("x") == b"1"

    run(tmp_path, test)


@pytest.mark.parametrize("live", [False, True])
def test_fork_gives_a_result_per_child_and_children_are_their_own(tmp_path: Path, live: bool) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        parent = await manager.create(SPEC, life=Life(metadata={"of": "me"}))
        await parent.files.write("x", "parent")
        if live:
            backend.faults["child 1"] = SandboxError("x")
        children = await manager.fork(parent.id, 3, live=live)
        good = [child.session for child in children if child.session]
        assert len(children) == 3 and [bool(child.error) for child in children] == [False, live, False]
        await parent.files.write("x", "later")
        await good[0].files.write("x", "child")
        assert [await each.files.read("x") for each in (parent, *good)][:2] == [b"later", b"child"]
        assert await good[1].files.read("x") == b"parent"
        assert manager.get(good[0].id).metadata == {"of": "me"} and parent.state is SandboxState.RUNNING
        for wrong in (0, 101):
            with pytest.raises(ValueError, match="1 to 100"):
                await manager.fork(parent.id, wrong)

    run(tmp_path, test)


def test_a_paused_box_forks_and_stays_paused(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        parent = await manager.create(SPEC)
        await parent.files.write("x", "1")
        for mode in (PauseMode.WARM, PauseMode.FILES):
            await manager.pause(parent.id, mode=mode)
            (child,) = await manager.fork(parent.id, 1)
            assert child.session and await child.session.files.read("x") == b"1"
            assert child.session.state is SandboxState.RUNNING and parent.state is SandboxState.PAUSED
            await manager.resume(parent.id)

    run(tmp_path, test)


@pytest.mark.parametrize("live", [False, True])
def test_a_parent_killed_while_it_forks_leaves_no_children(tmp_path: Path, live: bool) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        parent = await manager.create(SPEC)
        backend.slow = {"create"}
        fork = asyncio.create_task(manager.fork(parent.id, 2, live=live))
        await backend.waiting.wait()
        await manager.kill(parent.id)
        backend.go_on.set()
        with pytest.raises(SandboxGone):
            await fork
        assert not manager.live and not backend.boxes

    run(tmp_path, test)


@pytest.mark.parametrize("verb", ["pause", "snapshot", "resume"])
def test_kill_waits_for_no_move(tmp_path: Path, verb: str) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        if verb == "resume":
            await manager.pause(session.id)
        backend.slow = {verb}
        move = asyncio.create_task(getattr(manager, verb)(session.id))
        await backend.waiting.wait()
        assert await manager.kill(session.id)
        assert session.state is SandboxState.DEAD and not backend.boxes
        backend.go_on.set()
        with pytest.raises(SandboxGone):
            await move
        assert not manager.boxes().boxes

    run(tmp_path, test)


def test_a_cancelled_caller_leaves_no_half_done_move(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        backend.slow = {"pause"}
        move = asyncio.create_task(manager.pause(session.id))
        await backend.waiting.wait()
        move.cancel()
        with pytest.raises(asyncio.CancelledError):
            await move
        backend.go_on.set()
        assert await manager.resume(session.id)  # its turn comes after the pause
        assert session.state is SandboxState.RUNNING

    run(tmp_path, test)


def test_what_a_backend_cannot_is_refused_by_name(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        with pytest.raises(SandboxUnavailable, match="cannot live snapshot"):
            await manager.snapshot(session.id, live=True)
        backend.abilities = frozenset({Ability.USAGE})
        for refused in (manager.pause(session.id), manager.fork(session.id, 1), manager.fork(session.id, 1, live=True)):
            with pytest.raises(SandboxUnavailable, match="the folder backend cannot"):
                await refused
        assert (await manager.usage(session.id)).processes == 1

    run(tmp_path, test)


def test_a_box_of_files_only_is_not_forked_live_and_stays_paused(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        await manager.pause(session.id, mode=PauseMode.FILES)
        with pytest.raises(SandboxUnavailable, match="no process of it exists"):
            await manager.fork(session.id, 1, live=True)
        assert session.state is SandboxState.PAUSED and list(manager.live) == [session.id]
        assert await manager.resume(session.id)

    run(tmp_path, test)


def test_without_a_store_a_durable_snapshot_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC)
        with pytest.raises(SnapshotError, match="needs a store"):
            await manager.snapshot(session.id, durable=True)
        record = await manager.snapshot(session.id)
        assert not record.durable

    run(tmp_path, test, state=False)


def test_a_deadline_pauses_or_kills(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        paused = await manager.create(SPEC, life=Life(on_timeout=OnTimeout.PAUSE, auto_resume=True))
        killed = await manager.create(SPEC)
        manager.refresh(killed.id, 0.01)  # never earlier
        assert (deadline := manager.get(killed.id).deadline) and deadline > manager.get(killed.id).started_at + 60
        for session in (paused, killed):
            manager.set_timeout(session.id, 0.01)
        while killed.state is not SandboxState.DEAD or paused.state is not SandboxState.PAUSED:
            await asyncio.sleep(0.005)
        manager.set_timeout(paused.id, 300)
        await paused.files.write("x", "1")
        assert paused.state is SandboxState.RUNNING
        assert (deadline := manager.get(paused.id).deadline) and deadline > manager.get(paused.id).started_at + 299

    run(tmp_path, test)


def test_at_a_deadline_a_box_that_cannot_pause_ends(tmp_path: Path) -> None:
    async def test(manager: SandboxManager, backend: FolderBackend) -> None:
        session = await manager.create(SPEC, life=Life(on_timeout=OnTimeout.PAUSE))
        backend.faults["pause"] = SandboxError("no freezer")
        manager.set_timeout(session.id, 0)
        while session.state is not SandboxState.DEAD:
            await asyncio.sleep(0.005)

    run(tmp_path, test)
