"""Latency of boxes on this machine: ``python benchmarks/sandbox_latency.py [--rounds N] [--fifo]``.

Prints median, 99th percentile and minimum in milliseconds, of the backend alone: creation to the end of the first
command, round trip, pause, resume, cold pause (on swap that is on for it only), snapshot of a running box with 40 MiB
in 2,600 files changed, a child of that snapshot to its first reply, destruction, creations a second; and through the
manager: creation after a pause and creation to the end of the first command, on demand and from the warm pool; a
command's round trip, a file's round trip, destruction; and of one whole life against those of bubblewrap, kern-
sandbox and runsc, where these are installed, in turns. Guest: this machine's own programs.
On a busy machine the minimum is the figure to look at; ``--fifo`` (root) keeps other work off this one and its
keeper; the boxes themselves stay ordinary processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from benchmarks.pieces.swap import NoSwap, own_swap
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.abilities import Ability
from tandem.sandbox.backend import Call, Piece, Process, Root, Start
from tandem.sandbox.backends.freezer import Freezer
from tandem.sandbox.backends.frozen import NamespaceFrozen
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.backends.namespace_box import NamespaceBox
from tandem.sandbox.backends.paging import resident
from tandem.sandbox.manager import SandboxManager

BUBBLEWRAP = [
    "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/tmp",
]



def peers(folder: Path) -> dict[str, list[str] | str]:
    """One life of a box of each peer, from nothing to the end of ``true``; or why it is missing."""
    (folder / "true.c").write_text("int main(void) { return 0; }")
    root = folder / "root"
    for name in ("proc", "dev", "tmp", "etc"):
        (root / name).mkdir(parents=True)
    compiler = shutil.which("gcc") or shutil.which("cc")
    made = compiler and not subprocess.run([compiler, "-static", "-o", root / "true", folder / "true.c"]).returncode
    commands = {
        "bubblewrap (no limits, no files)": ("bwrap", [*BUBBLEWRAP, "true"], True),
        "kern-sandbox": ("kern", ["box", "peer", "--rm", "--rootfs", str(root), "--", "/true"], made),
        "runsc do": ("runsc", ["--network=none", "--ignore-cgroups", "do", "/bin/true"], True),
    }
    found: dict[str, list[str] | str] = {}
    for name, (program, arguments, ready) in commands.items():
        path = shutil.which(program)
        if path is None or not ready:
            found[name] = f"{program} is not installed" if path is None else "no static program could be compiled"
            continue
        tried = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60)
        found[name] = [path, *arguments] if tried.returncode == 0 else f"it fails: {tried.stderr.strip()[-200:]}"
    return found


class Table:
    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    async def time(self, name: str, work: Callable[[], Awaitable[object]]) -> object:
        started = time.perf_counter()
        result = await work()
        self.times.setdefault(name, []).append((time.perf_counter() - started) * 1000)
        return result

    def show(self) -> None:
        print(f"{'ms':<48}{'p50':>9}{'p99':>9}{'minimum':>9}{'n':>6}")
        for name, values in self.times.items():
            last = sorted(values)[min(len(values) - 1, round(0.99 * len(values)))]
            print(f"{name:<48}{statistics.median(values):>9.2f}{last:>9.2f}{min(values):>9.2f}{len(values):>6}")


def shell(text: str) -> Call:
    return Call(arguments=["/bin/sh", "-c", text], timeout_s=60, stdout_cap_bytes=4096, stderr_cap_bytes=4096)


TRUE = Call(arguments=["/bin/true"], timeout_s=10, stdout_cap_bytes=0, stderr_cap_bytes=0)
DIRTY = """python3 -c "
import os
for number in range(2600):
    os.makedirs(f'd{number % 40}', exist_ok=True)
    open(f'd{number % 40}/{number}', 'wb').write(os.urandom(16131))
" """
FILL = """
import hashlib, os, sys
held = bytearray(180 << 20)
for start in range(0, len(held), 1 << 20):  # two thirds of it cannot be compressed
    held[start:start + (683 << 10)] = os.urandom(683 << 10)
    held[start + (683 << 10):start + (1 << 20)] = b"x" * (341 << 10)
print(flush=True)
for line in sys.stdin:
    sum(held[::4096])
    print(hashlib.blake2b(held).hexdigest() if line.strip() else "", flush=True)
"""
MIB = 2**20
SETTLE_S = 0.05  # what the one before left behind is gone by then


def first_in_line(pid: int) -> None:
    os.sched_setscheduler(pid, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


async def measure_backend(rounds: int, *, fifo: bool = False) -> None:
    table, backend = Table(), NamespaceBackend()
    await (await backend.create(SandboxSpec(), timeout_s=60)).kill()
    if fifo:
        first_in_line(backend.keeper.pid)

    async def first(root: Root | None = None) -> NamespaceBox:
        box = await backend.create(SandboxSpec(), root=root, timeout_s=60)
        await box.call(TRUE)
        return box

    for _ in range(rounds):
        box = await table.time("create to end of first command", first)
        assert isinstance(box, NamespaceBox)
        for _ in range(5):
            await table.time("command round trip", lambda box=box: box.call(TRUE))
        await table.time("pause", box.pause)
        await table.time("resume", box.resume)
        await table.time("destroy", box.kill)
    for _ in range(max(1, rounds // 4)):
        box = await backend.create(SandboxSpec(), timeout_s=60)
        assert (await box.call(shell(DIRTY))).code == 0
        frozen = await table.time("snapshot, 40 MiB in 2,600 files changed", box.snapshot)
        assert isinstance(frozen, NamespaceFrozen)
        child = await table.time("child of the snapshot to its first reply", lambda frozen=frozen: first(frozen.root))
        assert isinstance(child, NamespaceBox)
        await frozen.release()
        await asyncio.gather(box.kill(), child.kill())
    await cold_pauses(backend, table, max(3, rounds // 10))
    started = time.perf_counter()
    for _ in range(5):
        boxes = await asyncio.gather(*(backend.create(SandboxSpec(), timeout_s=60) for _ in range(32)))
        await asyncio.gather(*(box.kill() for box in boxes))
    print(f"creates and destroys a second: {160 / (time.perf_counter() - started):.0f}")
    await backend.close()
    table.show()


async def cold_pauses(backend: NamespaceBackend, table: Table, rounds: int) -> None:
    """On swap that is on for this part only: there, and that the memory left and came back as it was."""
    memory: dict[str, list[int]] = {}

    def note_memory(name: str, box: NamespaceBox) -> None:
        pids = Freezer([], backend.keeper.pids[box.number]).processes()
        memory.setdefault(name, []).append(resident(pids))

    with contextlib.ExitStack() as held:
        try:
            if Ability.COLD_PAUSE not in backend.abilities:
                place = held.enter_context(own_swap(512 * MIB, Path.cwd()))
                print(f"cold pause: on {place}, which is swap for this part only")
        except NoSwap as error:
            print(f"cold pause: not measured; {error}")
            return
        for _ in range(rounds):
            box = await backend.create(SandboxSpec(), timeout_s=60)
            assert isinstance(box, NamespaceBox)
            process = await box.start(Start(arguments=["python3", "-c", FILL], stdin=True))
            told = aiter(process.output(from_start=True))
            await anext(told)

            async def ask(line: bytes, process: Process = process, told: AsyncIterator[Piece] = told) -> bytes:
                await process.send_stdin(line)
                return (await anext(told)).data

            before = await ask(b"digest\n")
            await table.time("touch 180 MiB that are there", lambda ask=ask: ask(b"\n"))
            await box.pause()
            note_memory("paused warm", box)
            await table.time("cold pause, 180 MiB", lambda box=box: box.pause(cold=True))
            note_memory("paused cold", box)
            await table.time("resume of it", box.resume)
            await table.time("touch 180 MiB after it", lambda ask=ask: ask(b"\n"))
            assert await ask(b"digest\n") == before, "memory came back other than it went"
            note_memory("after the resume, all touched", box)
            await box.kill()
    for name, values in memory.items():
        print(f"{name:<48}{statistics.median(values) / MIB:>9.1f} MiB of the processes' own")


async def life(manager: SandboxManager) -> None:
    box = await manager.create(SandboxSpec())
    await box.commands.run(["true"], timeout_s=10)
    await box.kill()


async def lives(manager: SandboxManager, table: Table, rounds: int) -> None:
    """One whole life of a box of ours and of each peer, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        others = peers(Path(folder))
        for name, reason in others.items():
            if isinstance(reason, str):
                print(f"{name}: missing, {reason}")
        for round in range(rounds):
            await asyncio.sleep(SETTLE_S)
            await table.time("one life: create, true, destroy", lambda: life(manager))
            for name, command in others.items():
                slow = command[0].endswith("runsc")
                if not isinstance(command, str) and not (slow and round % 5):
                    await asyncio.sleep(SETTLE_S)
                    started = time.perf_counter()
                    subprocess.run(command, check=True, capture_output=True)
                    table.times.setdefault(f"one life: {name}", []).append((time.perf_counter() - started) * 1000)
                    if slow:  # the kernel still takes its parts down for a second and a half
                        await asyncio.sleep(2)


async def measure_peers(rounds: int) -> None:
    table, manager = Table(), SandboxManager(SandboxSection(warm=0), NowhereSink())
    await life(manager)
    await lives(manager, table, rounds)
    await manager.close()
    table.show()


async def measure(rounds: int) -> None:
    table = Table()
    for warm in (0, 2):
        manager = SandboxManager(SandboxSection(warm=warm), NowhereSink())
        await life(manager)
        for _ in range(rounds):
            await asyncio.sleep(0.1)
            started = time.perf_counter()
            box = await table.time(f"create, {warm} warm", lambda manager=manager: manager.create(SandboxSpec()))
            await box.commands.run("true", timeout_s=10)
            table.times.setdefault(f"create to end of first sh -c true, {warm} warm", []).append(
                (time.perf_counter() - started) * 1000
            )
            await box.kill()
        await manager.close()
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink())
    for _ in range(rounds):
        box = await manager.create(SandboxSpec())
        for _ in range(5):
            await table.time("sh -c true", lambda box=box: box.commands.run("true", timeout_s=10))
        await table.time("python3 -c pass", lambda box=box: box.commands.run(["python3", "-c", ""], timeout_s=10))
        await table.time("write 10 kB", lambda box=box: box.files.write("a", b"x" * 10_000))
        await table.time("read 10 kB", lambda box=box: box.files.read("a"))
        await table.time("destroy", box.kill)
    await lives(manager, table, rounds)
    for _ in range(3):
        boxes = await table.time("create 64 at once", lambda: asyncio.gather(
            *(manager.create(SandboxSpec()) for _ in range(64))))
        await table.time("true in 64 at once", lambda boxes=boxes: asyncio.gather(
            *(box.commands.run(["true"], timeout_s=30) for box in boxes)))
        await table.time("destroy 64 at once", lambda boxes=boxes: asyncio.gather(*(box.kill() for box in boxes)))
    await manager.close()
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--fifo", action="store_true", help="run this process and the keeper at SCHED_FIFO 1")
    parser.add_argument("--only-backend", action="store_true", help="leave the manager out")
    parser.add_argument("--only-peers", action="store_true", help="whole lives of ours and of the peers, in turns")
    options = parser.parse_args()
    if options.fifo:
        first_in_line(0)
    if options.only_peers:
        asyncio.run(measure_peers(options.rounds))
        return
    asyncio.run(measure_backend(options.rounds, fifo=options.fifo))
    if not options.only_backend:
        asyncio.run(measure(options.rounds))


if __name__ == "__main__":
    main()
