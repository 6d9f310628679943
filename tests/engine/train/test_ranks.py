"""A rank that dies, fails or hangs: a named error within the deadline, and nobody is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bare_methods import GRPO

from tandem.core.errors import ClusterError
from tandem.engine.train.ranks import RankGroup
from tandem.trainer.batcher import make_plan
from tests.engine.train.test_ranked import SECTION, Process
from tests.engine.train.tiny import group_samples, sample

STOPPED_S = 8  # each answer before may take as long on a busy machine
PLAN = make_plan(1, group_samples(), GRPO, SECTION)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_named_and_a_new_group_resumes(how, tmp_path) -> None:
    group = RankGroup(2, timeout_s=60 if how is signal.SIGKILL else STOPPED_S)
    try:
        group.start()
        process = Process(group, folder=tmp_path)
        process.train(1, 1)
        process.store.save(1, {})
        (other,) = group.processes
        os.kill(other, how)
        began = time.monotonic()
        with pytest.raises(ClusterError) as caught:
            asyncio.run(process.step(PLAN))
        assert time.monotonic() - began < 50
        wanted = "was killed by SIGKILL" if how is signal.SIGKILL else f"did not answer within {STOPPED_S} s"
        assert f"rank 1 (process {other})" in str(caught.value) and wanted in str(caught.value)
        assert "resume" in caught.value.hint
        with pytest.raises(ClusterError, match="rank 1"):  # and says so at every later use
            asyncio.run(process.engine.score([each.trajectory for each in group_samples()]))
        with pytest.raises(ClusterError, match="rank 1"):
            process.store.save(2, {})
        assert process.store.steps() == [1]
        process.compute.close()
    finally:
        group.close()
    assert not alive(other)
    alone = Process(None, folder=tmp_path, seed=3)
    alone.store.restore(1)
    alone.train(2, 2)


def test_what_a_rank_raises_is_told_with_its_number() -> None:
    group = RankGroup(2, timeout_s=60)
    try:
        group.start()
        process = Process(group)
        samples = [sample([1, 10**6, 3, 4], [0, 1, 1, 1], name=f"{n}") for n in range(4)]  # no such token
        with pytest.raises(ClusterError, match=r"step 1: rank \d: \w+Error"):
            asyncio.run(process.step(make_plan(1, samples, GRPO, SECTION)))
    finally:
        group.close()


PARENT = """
import sys, time
from tandem.engine.train.ranks import RankGroup
group = RankGroup(2, timeout_s=60)
group.start()
print(*group.processes, flush=True)
time.sleep(60)
"""


def test_the_ranks_die_with_rank_0() -> None:
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert parent.stdout is not None
    other = int(parent.stdout.readline())
    assert alive(other)
    parent.kill()
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while alive(other) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(other)
