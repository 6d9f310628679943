"""A process that is killed while it saves leaves whole checkpoints: all kinds of weights, one process and two ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.train.test_ranked import KINDS, Process

ROOT = Path(__file__).parents[2]
BEGUN = """
import asyncio, os, sys
from pathlib import Path
import torch
from tandem.engine.train.ranks import RankGroup
from tests.engine.train.test_ranked import Process
folder, kind, ranks, begin = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
"""
# Children of one process that has loaded everything: each saves on and on, beside steps that move all weights.
FORKING = BEGUN + """
process = Process(None, kind, folder=folder, keep=2)
for begin in range(1, 10**9, 10**6):
    child = os.fork()
    if not child:
        optimizer = process.engine.optimizer
        for step in range(begin, begin + 10**6):
            for parameter in process.weights.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, float(step % 7 - 3))
            optimizer.step(1e-4)  # while the checkpoint before it is being written
            process.store.begin(step, {"step": step, "digest": process.weights.digest()})
    print(child, flush=True)
    if not sys.stdin.readline():
        break
    os.waitpid(child, 0)
os._exit(0)
"""
# Rank 0 of several, which take part in each save.
RANKED = BEGUN + """
group = RankGroup(ranks, timeout_s=60)
group.start()
process = Process(group, kind, folder=folder, keep=2)
print(os.getpid(), flush=True)
for step in range(begin, begin + 10**6):
    process.train(step, step)
    process.store.begin(step, {"step": step, "digest": process.weights.digest()})
"""


def saver(program: str, folder: Path, kind: str, *, ranks: int = 1, begin: int = 1) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder), kind, str(ranks), str(begin)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env=environment, cwd=ROOT,
    )  # fmt: skip


def kill(pid: int, survivor: Process, least: int, delay_s: float) -> int:
    """Kill the saver some time after it has saved step ``least`` or a later one; the newest checkpoint there is, which
    must be what was saved as that."""
    deadline = time.monotonic() + 60
    while (survivor.store.latest() or 0) < least:
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.001)
    latest = survivor.store.latest()
    assert latest is not None
    assert survivor.store.restore(latest) == {"step": latest, "digest": survivor.weights.digest()}
    return latest


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_of_ten_moments_leaves_a_whole_checkpoint(kind: str, tmp_path: Path) -> None:
    survivor, moments = Process(None, kind, folder=tmp_path, seed=7), random.Random(0)
    seen: list[int] = []
    process = saver(FORKING, tmp_path, kind)
    assert process.stdout is not None and process.stdin is not None
    for number in range(10):
        seen.append(kill(int(process.stdout.readline()), survivor, 1, moments.uniform(0.02, 0.2)))
        if number < 9:
            process.stdin.write(b"\n"), process.stdin.flush()
    assert seen == sorted(seen) and seen[-1] > seen[0]
    process.stdin.close()
    process.wait(timeout=300)
    process.stdout.close()
    survivor.compute.close()


def test_a_kill_while_two_ranks_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Of one kind, for ranks take seconds to start; what is restored is what one process holds."""
    survivor = Process(None, "mixture", folder=tmp_path, seed=7)
    process = saver(RANKED, tmp_path, "mixture", ranks=2)
    assert process.stdout is not None and process.stdin is not None
    assert kill(int(process.stdout.readline()), survivor, 2, random.uniform(0.02, 0.3)) >= 2
    process.wait(timeout=60)
    process.stdout.close(), process.stdin.close()
    survivor.compute.close()
