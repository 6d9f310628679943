"""Latency of boxes on this machine: ``python benchmarks/sandbox_latency.py [--rounds N]``.

Prints median and minimum in milliseconds of: creation after a pause and creation to the end of the first command, on
demand and from the warm pool; a command's round trip, a file's round trip, destruction; and of one whole life against
bubblewrap's, if that is installed, in turns.
On a busy machine the minimum is the figure to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.manager import SandboxManager

BUBBLEWRAP = [
    "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/tmp",
]


class Table:
    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    async def time(self, name: str, work: Callable[[], Awaitable[object]]) -> object:
        started = time.perf_counter()
        result = await work()
        self.times.setdefault(name, []).append((time.perf_counter() - started) * 1000)
        return result

    def show(self) -> None:
        print(f"{'ms':<48}{'median':>9}{'minimum':>9}{'n':>6}")
        for name, values in self.times.items():
            print(f"{name:<48}{statistics.median(values):>9.2f}{min(values):>9.2f}{len(values):>6}")


async def life(manager: SandboxManager) -> None:
    box = await manager.create(SandboxSpec())
    await box.commands.run(["true"], timeout_s=10)
    await box.kill()


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
    bubblewrap = shutil.which("bwrap")
    for _ in range(rounds):
        await table.time("one life: create, true, destroy", lambda: life(manager))
        if bubblewrap:
            started = time.perf_counter()
            subprocess.run([bubblewrap, *BUBBLEWRAP, "true"], check=True)
            table.times.setdefault("one life: bubblewrap (no limits, no files)", []).append(
                (time.perf_counter() - started) * 1000
            )
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
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
