"""How many boxes a machine holds: ``python benchmarks/sandbox_density.py [--boxes 1000] [--seconds 10] [--fifo]``.

Guest: this machine's own programs, each box with namespaces, control groups and files of its own. Makes ``--boxes``
idle boxes through the manager, 4 at a time, and tells: memory of the machine each (what is available before and
after), the proportional share (PSS) of their first processes, the threads and files of this process and the keeper;
how long one new command in one of them takes then, and all of them at once; the time to end them all. Then creates and
kills boxes for ``--seconds``, 1 and 4 at a time: creates a second, and the latency of each under that load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

from sandbox_latency import Table, first_in_line

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.session import Session

AT_ONCE = 4
SPEC = SandboxSpec()


def available_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1])
    raise SystemExit("this machine does not tell its available memory")


def pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


async def several(count: int, manager: SandboxManager) -> list[Session]:
    made: list[Session] = []

    async def some() -> None:
        while len(made) + waiting[0] < count:
            waiting[0] += 1
            try:
                made.append(await manager.create(SPEC))
            finally:
                waiting[0] -= 1

    waiting = [0]
    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return made


async def density(count: int, manager: SandboxManager, backend: NamespaceBackend) -> None:
    table = Table()
    before, started = available_kib(), time.perf_counter()
    boxes = await several(count, manager)
    took_s = time.perf_counter() - started
    await asyncio.sleep(1.0)
    each = (before - available_kib()) / count
    agents = list(backend.keeper.pids.values())
    print(f"{count} idle boxes, made {AT_ONCE} at a time: {count / took_s:.0f} a second")
    print(f"memory of the machine: {each / 1024:.2f} MiB each; first process: "
          f"{sum(map(pss_kib, agents)) / len(agents):.0f} KiB PSS each")
    for name, pid in (("this process", os.getpid()), ("keeper", backend.keeper.pid)):
        print(f"{name}: {len(os.listdir(f'/proc/{pid}/fd'))} open files, {pss_kib(pid) / 1024:.1f} MiB PSS")
    for at in range(0, count, max(1, count // 100)):
        await table.time("a command among them", lambda at=at: boxes[at].commands.run(["true"], timeout_s=60))
    await table.time("a command in all at once", lambda: asyncio.gather(
        *(box.commands.run(["true"], timeout_s=120) for box in boxes)))
    await table.time("the end of all", lambda: asyncio.gather(*(box.kill() for box in boxes)))
    table.show()


async def sustained(seconds: float, at_once: int, manager: SandboxManager) -> None:
    table, ended = Table(), time.perf_counter() + seconds
    count = 0

    async def lives() -> None:
        nonlocal count
        while time.perf_counter() < ended:
            box = await table.time(f"create, {at_once} at a time", lambda: manager.create(SPEC))
            assert isinstance(box, Session)
            await table.time(f"destroy, {at_once} at a time", box.kill)
            count += 1

    await asyncio.gather(*(lives() for _ in range(at_once)))
    print(f"{count / seconds:.0f} creates (and kills) a second over {seconds:g} s, {at_once} at a time")
    table.show()


async def main(boxes: int, seconds: float, fifo: bool) -> None:
    backend = NamespaceBackend()
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend)
    await (await manager.create(SPEC)).kill()
    if fifo:
        first_in_line(0)
        first_in_line(backend.keeper.pid)
    await density(boxes, manager, backend)
    for at_once in (1, AT_ONCE):
        await sustained(seconds, at_once, manager)
    await manager.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--fifo", action="store_true", help="run this process and the keeper at SCHED_FIFO 1")
    options = parser.parse_args()
    asyncio.run(main(options.boxes, options.seconds, options.fifo))
