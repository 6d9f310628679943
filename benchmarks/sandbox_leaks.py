"""What boxes leave behind: ``python benchmarks/sandbox_leaks.py [--cycles 1000] [--kills 2]``.

A server makes and ends boxes in all ways: killed, crashed (their first process gets SIGKILL from outside), killed
while paused, as children of a snapshot or of a live fork that outlive their parent, with a command past its deadline
that left others behind. Meanwhile the server itself gets SIGKILL, again and again; the next one on its state folder
finds what it left. At the end nothing may be left of it: processes, control groups, mounts, namespaces, files. Prints
the counts; exit code 1 when something is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxError
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.abilities import Ability
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager

KINDS = ("kill", "crash", "paused", "snapshot", "durable", "deadline", "live")
SERVER_TIMEOUT_S = 120.0  # between two lines of a server
SETTLE_S = 10.0
SPACES = ("mnt", "net", "pid", "user", "ipc", "uts")


async def cycle(manager: SandboxManager, backend: NamespaceBackend, kind: str) -> None:
    session = await manager.create(SandboxSpec())
    assert session.box is not None
    await session.commands.run("echo x > file; setsid sleep 600 >/dev/null 2>&1 & echo $! > left", timeout_s=30)
    match kind:
        case "crash":
            os.kill(backend.keeper.pids[int(session.box.handle)], signal.SIGKILL)
            await asyncio.wait_for(asyncio.shield(session.box.gone), 30)
        case "paused":
            await manager.pause(session.id)
        case "snapshot":
            children = await manager.fork(session.id, 2)
            for child in children:
                assert child.session is not None, child.error
                await manager.kill(child.session.id)
        case "durable":
            taken = await manager.snapshot(session.id)
            child = await manager.create(SandboxSpec(), snapshot=taken.id)
            await manager.kill(child.id)
            await manager.delete_snapshot(taken.id)
        case "live" if Ability.LIVE_FORK in backend.abilities:  # the parent ends first, in whose namespaces they are
            await session.commands.run("p=$(cat left); kill -9 $p; while kill -0 $p; do :; done 2>&1", timeout_s=30)
            await session.commands.start(["bash"])
            children = await manager.fork(session.id, 2, live=True)
            await manager.kill(session.id)
            for child in children:
                assert child.session is not None, child.error
                await manager.kill(child.session.id)
        case "deadline":
            late = await session.commands.run("setsid sleep 600 & sleep 600", timeout_s=0.05)
            assert late.timed_out
    await manager.kill(session.id)


async def serve(state: Path, count: int) -> None:
    """Take up what is there, end it, then the cycles; a line for each."""
    backend = NamespaceBackend(state_folder=state)
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend, state=state)
    recovery = await manager.open()
    for sandbox_id in list(manager.live):
        await manager.kill(sandbox_id)
    for snapshot in manager.snapshots.kept():
        await manager.delete_snapshot(snapshot.id)
    for kind in ("live", "kill"):  # a keeper's first live fork opens what it keeps for all later ones
        await cycle(manager, backend, kind)
    held = handles(backend.keeper.pid)
    print(f"keeper {backend.keeper.pid} {recovery.summary()}", flush=True)
    for number in range(count):
        try:
            await cycle(manager, backend, KINDS[number % len(KINDS)])
        except SandboxError as error:
            print(f"fault {number}: {error}", flush=True)
            raise
        print(f"cycle {number}", flush=True)
    assert not manager.live, f"left: {list(manager.live)}"
    print(f"grown {handles(backend.keeper.pid) - held} {open_files(os.getpid())}", flush=True)
    await manager.close()


def handles(keeper: int) -> int:
    """What the keeper holds open: files (mounts are), and what hangs in its own mount namespace."""
    return open_files(keeper) + len(Path(f"/proc/{keeper}/mountinfo").read_text().splitlines())


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def groups_of(keepers: set[int]) -> list[str]:
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup")
            if any(f"-{keeper}-" in folder and "tandem-" in folder for keeper in keepers)]


def processes_of(keepers: set[int], spaces: set[str]) -> list[str]:
    """Processes in our control groups or namespaces, and keepers themselves."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            groups = Path(f"/proc/{name}/cgroup").read_text()
            ours = {os.readlink(f"/proc/{name}/ns/{space}") for space in SPACES} & spaces
        except OSError:
            continue
        if int(name) in keepers or ours or any(f"-{keeper}-" in groups and "tandem-" in groups for keeper in keepers):
            found.append(name)
    return found


def hold_spaces(pid: int, held: ExitStack) -> set[str]:
    """Names of the namespaces that are not ours; held open, since the kernel gives the number of one that is gone to
    the next one that anybody makes."""
    found = set()
    for space in SPACES:
        path = f"/proc/{pid}/ns/{space}"
        held.callback(os.close, os.open(path, os.O_RDONLY))
        found.add(os.readlink(path))
    return found - {os.readlink(f"/proc/self/ns/{space}") for space in SPACES}


def files_of(state: Path) -> list[str]:
    """All but the table, the audit log and the marks that a closed server keeps."""
    kept = ("sandboxes.db", "audit", "writer.lock", ".boot", "cgroups.json")
    return [str(path.relative_to(state)) for path in state.rglob("*")
            if path.is_file() and not any(part.startswith(kept) for part in path.relative_to(state).parts)]


def read_line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise SystemExit(f"a server ended with code {server.wait()} before it was done")
    return line.strip()


def main(cycles: int, kills: int, seed: int) -> int:
    draw = random.Random(seed)
    keepers: set[int] = set()
    spaces: set[str] = set()
    mounts = Path("/proc/self/mountinfo").read_text()
    started = time.perf_counter()
    left = cycles
    with tempfile.TemporaryDirectory(prefix="leaks-") as folder, ExitStack() as held:
        state = Path(folder) / "state"
        for life in range(kills + 1):
            last = life == kills
            count = left if last else max(1, left // (kills + 1 - life))
            left -= count
            server = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(state), "--cycles", str(count if last else count + 1)],
                stdout=subprocess.PIPE, text=True,
            )
            try:
                _, keeper, recovery = read_line(server).split(" ", 2)
                keepers.add(int(keeper))
                spaces |= hold_spaces(int(keeper), held)
                print(f"server {life + 1}: {recovery}; {count} cycles")
                for _ in range(count):
                    line = read_line(server)
                    assert line.startswith("cycle"), line
                if not last:
                    time.sleep(draw.random() * 0.03)  # somewhere in the next one
                    server.send_signal(signal.SIGKILL)
                    server.wait()
                    continue
                _, grown, files = read_line(server).split()
                server.wait(timeout=SERVER_TIMEOUT_S)
            finally:
                server.kill()
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = (processes_of(keepers, spaces), groups_of(keepers))
            if found == ([], []) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        remains = {
            "processes": found[0], "control groups": found[1], "files": files_of(state),
            "mounts": sorted(set(Path("/proc/self/mountinfo").read_text().splitlines()) - set(mounts.splitlines())),
            "namespaces": [each for each in spaces if processes_of(set(), {each})],
            "handles of the keeper": [f"{grown} more than at its start"] if int(grown) > 0 else [],
        }
    took_s = time.perf_counter() - started
    print(f"{cycles} cycles of {', '.join(KINDS)}, {kills} SIGKILLs of the server, {took_s:.1f} s; "
          f"{files} files open in the last server")
    for what, each in remains.items():
        print(f"  {what:<22} {len(each)} left{': ' + ', '.join(each[:5]) if each else ''}")
    return int(any(remains.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.cycles))
    else:
        sys.exit(main(arguments.cycles, arguments.kills, arguments.seed))
