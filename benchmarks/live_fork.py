"""Live forks on this machine: ``python benchmarks/live_fork.py [--rounds N] [--fifo]``.

Prints median, 99th percentile and minimum in milliseconds, of the namespace backend alone. Guest: this machine's own
programs. A shell, and a Python interpreter with 50 MiB of state, each idle at its stdin, are forked live: one child
from the request to its first reply, one at a time; and 20 children in one fork, per child. Then what a fork of files
costs for comparison: each child of a snapshot of 40 MiB in 2,600 files to its first reply. Memory is told as the
children's proportional share (PSS) beside what they have resident. On a busy machine the minimum is the figure to look
at; ``--fifo`` (root) keeps other work off this process and its keeper; the boxes stay ordinary processes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from sandbox_latency import DIRTY, TRUE, Table, first_in_line, shell

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backend import Box, Start
from tandem.sandbox.backends.live_fork import obstacle
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.backends.namespace_box import NamespaceBox
from tandem.sandbox.backends.process import NamespaceProcess

STATE_BYTES = 50 << 20
SUBJECTS = {
    "bash": (["bash"], "x=41", "echo answer $((x + 1))"),
    "python3 -i, 50 MiB": (["python3", "-i", "-q"], f"x = 41; blob = bytearray(b'x' * {STATE_BYTES})",
                           "print('answer', x + 1)"),
}  # fmt: skip


async def answer(process: NamespaceProcess, line: str) -> None:
    """Returns when the process has printed ``answer 42``."""
    await process.send_stdin(f"{line}\n".encode())
    heard = b""
    async with asyncio.timeout(20):
        async for piece in process.output(from_start=True):
            heard += piece.data
            if b"answer 42" in heard:
                return
    raise RuntimeError(f"it ended without an answer: {heard!r}")


def copied(child: Box | Exception) -> tuple[NamespaceBox, NamespaceProcess]:
    if isinstance(child, Exception):
        raise child
    assert isinstance(child, NamespaceBox) and child.carried is not None
    return child, child.carried


def memory_mib(agent: int) -> tuple[float, float]:
    """PSS and resident memory of the copy below an agent."""
    (pid,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) / 1024, int(lines["Rss"].split()[0]) / 1024


async def measure(rounds: int, *, fifo: bool) -> None:
    table, backend = Table(), NamespaceBackend()
    await (await backend.create(SandboxSpec(), timeout_s=60)).kill()
    if fifo:
        first_in_line(backend.keeper.pid)
    spec = SandboxSpec()
    for name, (arguments, prepare, ask) in SUBJECTS.items():
        box = await backend.create(spec, timeout_s=60)
        assert isinstance(box, NamespaceBox)
        process = await box.start(Start(arguments=arguments, stdin=True))
        await answer(process, f"{prepare}\n{ask}")
        for _ in range(rounds):
            started = time.perf_counter()
            child, carried = copied((await box.fork([spec], timeout_s=20))[0])
            table.times.setdefault(f"{name}: live fork", []).append((time.perf_counter() - started) * 1000)
            await answer(carried, ask)
            table.times.setdefault(f"{name}: live fork to first reply", []).append(
                (time.perf_counter() - started) * 1000
            )
            await table.time(f"{name}: destroy a child", child.kill)
        for _ in range(max(1, rounds // 20)):
            started = time.perf_counter()
            children = [copied(child) for child in await box.fork([spec] * 20, timeout_s=60)]
            await asyncio.gather(*(answer(carried, ask) for _, carried in children))
            table.times.setdefault(f"{name}: 20 children to their replies, each", []).append(
                (time.perf_counter() - started) * 1000 / 20
            )
            shares = [memory_mib(backend.keeper.pids[child.number]) for child, _ in children]
            await asyncio.gather(*(child.kill() for child, _ in children))
        print(f"{name}: a child of 20 has {sum(pss for pss, _ in shares) / 20:.1f} MiB PSS of "
              f"{sum(rss for _, rss in shares) / 20:.1f} MiB resident")
        await box.kill()
    for _ in range(max(1, rounds // 10)):
        box = await backend.create(spec, timeout_s=60)
        assert (await box.call(shell(DIRTY))).code == 0
        frozen = await box.snapshot()
        for _ in range(4):
            started = time.perf_counter()
            child = await backend.create(spec, root=frozen.root, timeout_s=60)
            await child.call(TRUE)
            table.times.setdefault("files only, 40 MiB in 2,600 files: child to first reply", []).append(
                (time.perf_counter() - started) * 1000
            )
            await child.kill()
        await frozen.release()
        await box.kill()
    await backend.close()
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--fifo", action="store_true", help="run this process and the keeper at SCHED_FIFO 1")
    options = parser.parse_args()
    if obstacle():
        raise SystemExit(f"no live fork here: {obstacle()}")
    if options.fifo:
        first_in_line(0)
    asyncio.run(measure(options.rounds, fifo=options.fifo))


if __name__ == "__main__":
    main()
