"""Number sorting of reasoning-gym, for the ``tiny`` model: its questions, its score, and no box.

The demonstrations come from a teacher who writes a list well but often puts the numbers in any order: the right
order is left to reinforcement. Needs the package ``reasoning-gym``.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, cast

import reasoning_gym  # pyright: ignore[reportMissingImports]: no dependency of the project

from tandem.core.types import Episode, Message, Role, Task
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop

NUMBERS = 3  # in one list
SURE = 0.4  # how often the teacher knows the order; else it takes any


@lru_cache(maxsize=1 << 14)
def _dataset(seed: int) -> Any:
    return reasoning_gym.create_dataset(
        "number_sorting", seed=seed, size=1, min_numbers=NUMBERS, max_numbers=NUMBERS,
        min_decimals=0, max_decimals=0, min_value=0, max_value=9,
    )  # fmt: skip


def make_task(seed: int, index: int) -> Task:
    """Task number ``index``: the generator's entry (private), and what the teacher says."""
    draw = random.Random(f"{seed}/{index}")
    entry = _dataset(draw.randrange(2**31))[0]
    about = entry["metadata"]
    shown = entry["answer"] if draw.random() < SURE else str(draw.sample(about["original_numbers"], NUMBERS))
    return task(
        entry["question"].splitlines()[0],  # without the page about brackets, which the teacher shows
        id=f"sorting-{seed % 10**6}-{index}",
        entry=entry,
        family=about["direction"],
        demonstration=shown,
    )


def score(episode: Episode, task: Task) -> float:
    """1 for a list in the right order, else 0; the generator's own rule."""
    return float(_dataset(0).score_answer(episode.final_message, cast(dict[str, object], task.private["entry"])))


def demonstrate(task: Task) -> list[Message]:
    return [Message(role=Role.ASSISTANT, content=str(task.private["demonstration"]))]


environment = Environment(
    tasks=generated(make_task),
    eval_tasks=generated(make_task, held_out=True),
    workflow=tool_loop([]),
    rewards=[Reward(score)],
    demonstrate=demonstrate,
    template=None,
)
