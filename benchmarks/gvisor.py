"""Times of the gVisor backend: create, command, pause, snapshots, restore, forks, destroy, and memory.

    python benchmarks/gvisor.py [--rounds 10]

Needs root and ``runsc`` on the PATH. Prints p50, p99 and the least of each in milliseconds. The guest is the host
template, its dirty state a Python interpreter that waits with 20 MiB of its own, and for the snapshot of files 40 MiB
in 2,600 files.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backend import Box, Call, Start
from tandem.sandbox.backends.gvisor import GvisorBackend
from tandem.sandbox.backends.gvisor_box import GvisorBox

TRUE = Call(arguments=["/bin/true"], timeout_s=20, stdout_cap_bytes=1, stderr_cap_bytes=999)
HOLDER = "import sys; held = b'x' * (20 << 20); print('held', flush=True); sys.stdin.read()"
FILES = """import os
for folder in range(26):
    os.makedirs(f"d/{folder}")
    for name in range(100):
        open(f"d/{folder}/{name}", "wb").write(b"x" * 16132)"""
FILL = Call(arguments=["python3", "-c", FILES], timeout_s=60, stdout_cap_bytes=1, stderr_cap_bytes=999)
Times = defaultdict[str, list[float]]


async def main(rounds: int) -> None:
    times: Times = defaultdict(list)
    backend = GvisorBackend()
    try:
        await (await backend.create(SandboxSpec(), timeout_s=60)).kill()  # the first makes what all need
        for _ in range(rounds):
            await one(backend, times)
    finally:
        await backend.close()
    for what, taken in times.items():
        taken.sort()
        unit = "MiB" if "memory" in what else "ms"
        p50, p99 = (taken[round(part * (len(taken) - 1))] for part in (0.5, 0.99))
        print(f"{what:44} p50 {p50:8.1f}  p99 {p99:8.1f}  least {taken[0]:8.1f}  {unit}  n {len(taken)}")


async def one(backend: GvisorBackend, times: Times) -> None:
    start = time.perf_counter()

    def note(what: str) -> None:
        nonlocal start
        times[what].append((time.perf_counter() - start) * 1000)
        start = time.perf_counter()

    box = await backend.create(SandboxSpec(), timeout_s=60)
    note("create, agent answers")
    await box.call(TRUE)
    note("first command")
    for _ in range(5):
        start = time.perf_counter()
        await box.call(TRUE)
        note("command")
    process = await box.start(Start(arguments=["python3", "-c", HOLDER], stdin=True))
    async for _ in process.output(from_start=True):
        break
    start = time.perf_counter()
    await box.pause()
    note("pause")
    await box.resume()
    note("resume")
    frozen = await box.snapshot(live=True)
    note("live snapshot")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "saved"
        await frozen.save(place)
        await frozen.release()
        start = time.perf_counter()
        again = await backend.restore(place, SandboxSpec(), timeout_s=60)
        await again.call(TRUE)
        note("restore to first reply")
        shutil.rmtree(place)
    start = time.perf_counter()
    (child,) = await box.fork([SandboxSpec()], timeout_s=60)
    assert not isinstance(child, Exception), child
    await child.call(TRUE)
    note("live fork to first reply")
    times["memory of the box (PSS)"].append(pss_mib(box))
    times["memory of a fork (PSS)"].append(pss_mib(child))
    start = time.perf_counter()
    await child.kill()
    note("destroy, processes gone")
    await again.kill()
    start = time.perf_counter()
    none = await box.snapshot()
    note("snapshot of files, none changed")
    await none.release()
    await box.call(FILL)
    start = time.perf_counter()
    files = await box.snapshot()
    note("snapshot of files, 40 MiB in 2,600 changed")
    child = await backend.create(SandboxSpec(), root=files.root, timeout_s=60)
    await child.call(TRUE)
    note("child of that snapshot to first reply")
    for each in (box, child):
        await each.kill()
    await files.release()


def pss_mib(box: Box) -> float:
    """Of the sandbox process and all below it."""
    assert isinstance(box, GvisorBox)
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    family = {box.pid}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    total_kib = 0
    for pid in family:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kib / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    asyncio.run(main(parser.parse_args().rounds))
