from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from folderbox import FolderBackend, processes_in, stopped

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError
from tandem.sandbox.audit import read, verify
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import BoxRecord
from tandem.sandbox.recovery import rest_of
from tandem.sandbox.snapshot import Snapshots

ROOT = Path(__file__).parents[2]


class Nowhere:
    def emit(self, event: object, *, cause: int = -1) -> int:
        return 0

    def put_blob(self, data: bytes) -> str:
        raise NotImplementedError


def killed(folder: Path) -> dict[str, str]:
    """What a server said before it was killed."""
    path = f"{ROOT}:{ROOT / 'tests/sandbox'}"
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests/sandbox/killed_server.py"), str(folder)], stdout=subprocess.PIPE,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
    ) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        server.send_signal(signal.SIGKILL)
    return json.loads(said)


def opened(folder: Path) -> SandboxManager:
    backend = FolderBackend(folder / "backend")
    return SandboxManager(SandboxSection(warm=0), Nowhere(), backend=backend, state=folder / "state")


def test_a_killed_server_loses_no_box_and_leaks_none(tmp_path: Path) -> None:
    ids = killed(tmp_path)

    async def main() -> None:
        manager = opened(tmp_path)
        assert isinstance(manager.snapshots, Snapshots)
        recovery = await manager.open()
        names = {value: key for key, value in ids.items()}
        undone = {names[each] for each in recovery.undone}
        assert undone == {"pausing", "resuming", "snapshotting", "forking"}
        assert len(recovery.adopted) == 9 and not recovery.lost  # eight by name, and the child
        assert len(recovery.swept) == 2  # the children of the fork that was under way
        rests = {names.get(record.id, "child"): record.state for record in manager.boxes().boxes}
        paused = {name for name, state in rests.items() if state is SandboxState.PAUSED}
        assert paused >= {"warm", "files", "resuming"} and paused - {"due"} == {"warm", "files", "resuming"}
        assert len(manager.boxes(metadata={"for": "test"}).boxes) == 9
        for name in ("running", "pausing", "snapshotting", "forking"):
            assert await manager.session(ids[name]).files.read("name") == name.encode()
        for name in ("warm", "files", "resuming"):
            assert await manager.resume(ids[name])
            assert await manager.session(ids[name]).files.read("name") == name.encode()
        while manager.get(ids["due"]).state is not SandboxState.PAUSED:
            await asyncio.sleep(0.01)
        again = await manager.create(SandboxSpec(), snapshot="base")
        assert await again.files.read("name") == b"saved" and again.id not in names
        assert [record.id for record in manager.snapshots.kept()] == [ids["snapshot"]]
        await manager.close()

    asyncio.run(main())
    assert processes_in(tmp_path) == []
    assert not list((tmp_path / "backend" / "boxes").iterdir())
    assert verify(tmp_path / "state" / "audit").bad is None
    assert {line.action for line in read(tmp_path / "state" / "audit")} >= {"create", "pause", "fork", "kill", "open"}


def test_boxes_that_died_with_their_server_are_said_to_be_lost(tmp_path: Path) -> None:
    ids = killed(tmp_path)
    for pid in processes_in(tmp_path / "backend" / "boxes"):
        subprocess.run(["kill", "-9", str(pid)], check=True)

    async def main() -> None:
        manager = opened(tmp_path)
        recovery = await manager.open()
        assert set(recovery.adopted) == {ids["files"]} and ids["running"] in recovery.lost
        assert list(manager.live) == [ids["files"]]
        await manager.close()

    asyncio.run(main())


def test_a_server_that_leaves_is_taken_up_by_the_next(tmp_path: Path) -> None:
    async def first() -> str:
        manager = opened(tmp_path)
        await manager.open()
        session = await manager.create(SandboxSpec())
        await manager.pause(session.id)
        with pytest.raises(SandboxError, match="belongs to the running server"):
            opened(tmp_path)
        await manager.leave()
        return session.id

    async def second(box_id: str) -> None:
        manager = opened(tmp_path)
        recovery = await manager.open()
        assert recovery.adopted == [box_id] and not recovery.undone
        (pid,) = processes_in(tmp_path / "backend" / "boxes")
        assert stopped(pid) and await manager.resume(box_id) and not stopped(pid)
        await manager.close()

    asyncio.run(second(asyncio.run(first())))


def test_a_box_that_cannot_be_brought_to_rest_is_ended(tmp_path: Path) -> None:
    ids = killed(tmp_path)

    async def main() -> None:
        manager = opened(tmp_path)
        assert isinstance(manager.backend, FolderBackend)
        manager.backend.faults["resume"] = RuntimeError("no way")
        recovery = await manager.open()
        assert ids["running"] in recovery.lost and ids["warm"] in recovery.adopted
        await manager.close()

    asyncio.run(main())
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize(("state", "intent", "rest"), [
    (SandboxState.PAUSING, "pause warm", SandboxState.RUNNING),
    (SandboxState.RESUMING, "resume", SandboxState.PAUSED),
    (SandboxState.FORKING, "fork into 3 from paused", SandboxState.PAUSED),
    (SandboxState.SNAPSHOTTING, "snapshot from running", SandboxState.RUNNING),
    (SandboxState.PAUSED, "", SandboxState.PAUSED),
])
def test_every_move_leads_back_to_where_it_began(state: SandboxState, intent: str, rest: SandboxState) -> None:
    assert rest_of(BoxRecord(id="x", spec=SandboxSpec(), state=state, intent=intent)) is rest


SERVER = """
import asyncio, json, os, signal, sys
from pathlib import Path
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backends.freezer import Freezer
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import PauseMode

async def main():
    state = Path(sys.argv[1])
    backend = NamespaceBackend(state_folder=state, grace_s=30)
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend, state=state)
    await manager.open()
    boxes = {name: await manager.create(SandboxSpec()) for name in ("running", "warm", "files", "pausing")}
    for name, session in boxes.items():
        await session.files.write("name", name)
        await session.commands.run("while :; do echo >> ticks; sleep 0.02; done & echo", timeout_s=20)
    await manager.pause(boxes["warm"].id)
    await manager.pause(boxes["files"].id, mode=PauseMode.FILES)
    print(json.dumps({name: session.id for name, session in boxes.items()}), flush=True)
    freeze = Freezer.freeze

    async def last(self):
        await freeze(self)
        os.kill(os.getpid(), signal.SIGKILL)

    Freezer.freeze = last
    await manager.pause(boxes["pausing"].id)

asyncio.run(main())
"""


def test_namespaces_a_server_killed_in_the_middle_of_a_pause_loses_no_box(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    ids: dict[str, str] = json.loads(done.stdout)

    async def main() -> None:
        backend = NamespaceBackend(state_folder=tmp_path)
        manager = SandboxManager(SandboxSection(warm=0), Nowhere(), backend=backend, state=tmp_path)
        recovery = await manager.open()
        try:
            assert set(recovery.adopted) == set(ids.values()) and recovery.undone == [ids["pausing"]]
            assert recovery.strays == 0 and not recovery.lost and not recovery.swept
            states = {name: manager.get(each).state for name, each in ids.items()}
            still = {"warm": SandboxState.PAUSED, "files": SandboxState.PAUSED}
            assert states == {"running": SandboxState.RUNNING, "pausing": SandboxState.RUNNING, **still}
            for name in ("warm", "files"):
                assert await manager.resume(ids[name])
            for name, each in ids.items():
                session = manager.session(each)
                assert await session.files.read("name") == name.encode()
                ticking = "a=$(wc -l < ticks); sleep 0.3; test $(wc -l < ticks) -gt $a && echo goes"
                told = await session.commands.run(ticking, timeout_s=20)
                assert told.stdout == ("" if name == "files" else "goes\n")  # of that one the files count only
        finally:
            await manager.close()
        assert not [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"-{keeper_of(tmp_path)}-" in path]

    asyncio.run(main())


def keeper_of(folder: Path) -> str:
    """From the names of its control groups; a word that no path has where there are none."""
    groups = json.loads((folder / "cgroups.json").read_text())
    return groups[0][0].rsplit("/", 1)[-1].split("-")[2] if groups else "none"


def test_namespaces_cycles_crashes_and_killed_servers_leave_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/sandbox_leaks.py"), "--cycles", "24"], cwd=ROOT, capture_output=True,
        text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 cycles" in done.stdout and done.stdout.count(" 0 left") == 6
