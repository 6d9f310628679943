"""Rewards in killable processes: case 10, typed ends, no process left."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rewards_for_tests import (
    answer_is_right,
    async_one,
    dies,
    exits,
    loops_in_python,
    no_verdict,
    not_a_number,
    one,
    prints,
    raises,
    slow,
    starts_daemons,
    stuck_in_native_code,
    torch_is_loaded,
    wrong_type,
)

from tandem.core import wire
from tandem.core.errors import RewardError
from tandem.core.types import Episode, FailureKind, Task
from tandem.envs.reward import Reward, score, total
from tandem.envs.reward_pool import RewardPool

TASK = Task(id="t", messages=(), private={"answer": "42"})


def episode(number=0, final_message=""):
    return Episode(
        id=f"e{number}", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=(), final_message=final_message
    )


async def verdicts(functions, *, time_s=5.0, size=2):
    pool = RewardPool(size=size)
    try:
        return await asyncio.gather(*(
            score(Reward(each), episode=episode(n), task=TASK, box=None, pool=pool, time_s=time_s)
            for n, each in enumerate(functions)
        )), pool
    finally:
        await pool.close()


def test_case_10_stuck_rewards_are_killed_and_good_ones_scored():
    start = time.monotonic()
    bad = [loops_in_python, stuck_in_native_code, raises]
    made, pool = asyncio.run(verdicts([*bad, *[one] * 20], time_s=2.0))
    kinds = [verdict.score.failure for verdict in made]
    assert kinds[:3] == [FailureKind.REWARD_TIMEOUT, FailureKind.REWARD_TIMEOUT, FailureKind.REWARD]
    assert [verdict.score.value for verdict in made[3:]] == [1.0] * 20
    assert all(2.0 <= verdict.duration_s < 60 for verdict in made[:2])
    assert "KeyError" in made[2].score.detail and "rewards_for_tests.py:" in made[2].score.detail
    assert pool.num_killed == 2
    assert time.monotonic() - start < 120


def test_values_and_typed_ends():
    made, _ = asyncio.run(verdicts(
        [async_one, no_verdict, wrong_type, not_a_number, prints, exits, dies, torch_is_loaded, one]
    ))
    scores = [verdict.score for verdict in made]
    assert [each.value for each in scores] == [1.0, None, None, None, 0.5, None, None, 0.0, 1.0]
    assert scores[1].failure is FailureKind.REWARD_MISSING
    assert scores[2].failure is FailureKind.REWARD
    assert scores[2].detail == "reward wrong_type on episode e2: it returned str, not a number"
    assert "not a finite number" in scores[3].detail
    assert scores[5].failure is scores[6].failure is FailureKind.REWARD
    assert "died" in scores[6].detail


def test_a_reward_sees_the_task_and_the_episode():
    async def run():
        pool = RewardPool(size=1)
        try:
            right, wrong = [
                await score(Reward(answer_is_right), episode=made, task=TASK, box=None, pool=pool, time_s=5)
                for made in (episode(0, "42"), episode(1, "41"))
            ]
            return right.score.value, wrong.score.value
        finally:
            await pool.close()

    assert asyncio.run(run()) == (1.0, 0.0)


def test_the_limit_does_not_count_the_queue():
    made, pool = asyncio.run(verdicts([slow] * 8, time_s=2.0, size=1))
    assert [verdict.score.value for verdict in made] == [0.25] * 8
    assert pool.num_killed == 0


def test_close_and_cancel_leave_no_process():
    async def run():
        pool = RewardPool(size=2)
        pool.warm()
        call = asyncio.create_task(pool.call(Reward(loops_in_python).reference, episode(), TASK, time_s=60))
        await asyncio.sleep(1.0)
        workers = [*pool._idle, *pool._busy]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await pool.close()
        return [worker.process.returncode for worker in workers]

    assert all(code is not None for code in asyncio.run(run()))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["close", "timeout", "death", "kill"])
def test_what_a_reward_started_in_a_session_of_its_own_ends_with_it(tmp_path, end):
    task = Task(id="t", messages=(), private={"folder": str(tmp_path), "end": end})

    async def run():
        pool = RewardPool(size=1)
        try:
            await pool.call(Reward(starts_daemons).reference, episode(), task, time_s=1.5 if end == "timeout" else 30)
        except RewardError:
            assert end in ("timeout", "death")
        if end == "kill":
            os._exit(0)  # as a killed run: nobody closes anything
        await pool.close()

    if end == "kill":
        child = os.fork()
        if not child:
            try:
                asyncio.run(run())
            finally:
                os._exit(1)
        os.waitpid(child, 0)
    else:
        asyncio.run(run())
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and end == "kill" and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody waits for the guard of a killed run
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, 9)
    assert left == []


def test_weighted_sum_and_missing_scores():
    made, _ = asyncio.run(verdicts([one, no_verdict]))
    good, missing = (verdict.score for verdict in made)
    assert total([good]) == (1.0, None)
    value, failure = total([good, missing])
    assert value is None and failure is not None and failure.kind is FailureKind.REWARD_MISSING
    measured_only = wire.decode(wire.encode(missing), type(missing))
    assert total([good, type(missing)(name="m", value=None, weight=0.0, failure=measured_only.failure)]) == (1.0, None)


def test_a_killed_parent_takes_its_stuck_workers_along():
    program = """
import asyncio, sys
from rewards_for_tests import stuck_in_native_code
from tandem.core.types import Episode, Task
from tandem.envs.reward import Reward
from tandem.envs.reward_pool import RewardPool
async def main():
    pool = RewardPool(size=1)
    made = Episode(id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=())
    task = Task(id="t", messages=())
    call = asyncio.create_task(pool.call(Reward(stuck_in_native_code).reference, made, task, time_s=99))
    while not pool._busy:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(next(iter(pool._busy)).process.pid, flush=True)
    await call
asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    try:
        worker = int(parent.stdout.readline())
        assert Path(f"/proc/{worker}").exists()
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 30
    while _alive(worker):
        assert time.monotonic() < deadline, f"worker {worker} outlived its parent"
        time.sleep(0.02)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
