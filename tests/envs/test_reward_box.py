"""Rewards that look into the episode's real box, from their own process."""

import asyncio
import time

import pytest
from box_rewards_for_tests import (
    answer_file_is_right,
    asks_too_much,
    exit_code,
    hangs_in_the_box,
    is_missing,
    loops_without_asking,
    writes_and_lists,
)

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.errors import SandboxGone
from tandem.core.types import Episode, FailureKind, Task
from tandem.envs.reward import Reward, score
from tandem.envs.reward_pool import RewardPool
from tandem.sandbox.manager import SandboxManager, spec_of

TASK = Task(id="t", messages=(), private={"answer": "42"})
EPISODE = Episode(id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=())


class Quiet:
    def emit(self, event, *, cause=-1):
        return 0

    def put_blob(self, data):
        return ""


def scores(functions, *, time_s=5.0, kill_first=False):
    async def run():
        section = SandboxSection()
        manager, pool = SandboxManager(section, Quiet()), RewardPool(size=1)
        try:
            box = await manager.create(spec_of(section))
            await box.files.write("answer.txt", "42\n")
            if kill_first:
                await box.kill()
            made = []
            for each in functions:
                verdict = await score(Reward(each), episode=EPISODE, task=TASK, box=box, pool=pool, time_s=time_s)
                made.append(verdict.score)
            return made
        finally:
            await pool.close()
            await manager.close()

    return asyncio.run(run())


def test_a_reward_reads_writes_and_runs_in_the_box():
    made = scores([answer_file_is_right, exit_code, writes_and_lists, is_missing, asks_too_much])
    assert [each.value for each in made] == [1.0, 3.0, 1.0, 1.0, None]
    assert made[4].failure is FailureKind.REWARD and "cannot kill the box" in made[4].detail


def test_a_reward_that_takes_the_box_has_the_same_hard_limit():
    start = time.monotonic()
    made = scores([loops_without_asking, hangs_in_the_box, answer_file_is_right], time_s=1.0)
    assert [each.failure for each in made] == [FailureKind.REWARD_TIMEOUT, FailureKind.REWARD_TIMEOUT, None]
    assert made[2].value == 1.0 and time.monotonic() - start < 60


def test_a_lost_box_is_no_verdict():
    with pytest.raises(SandboxGone):
        scores([answer_file_is_right], kill_first=True)
