"""Three chores on a file in the box. For the ``tiny`` model, which starts from nothing and learns in minutes.

The reward looks at the file that the agent left in the box. The demonstrations come from a teacher who writes every
command well but often takes the wrong one: what is right is left to reinforcement. Every task is made from
(seed, index) alone.
"""

from __future__ import annotations

import random

from tandem.core.protocols import Sandbox
from tandem.core.types import Message, Role, Task, ToolCall
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop

COMMANDS = {
    "sort": "sort -n list > out",
    "reverse": "tac list > out",
    "count": "wc -l < list > out",
    "first": "head -n 1 list > out",
}
SURE = 0.3  # how often the teacher knows the command; else it takes any


def make_task(seed: int, index: int) -> Task:
    """Task number ``index``: a list of numbers, a chore (its family), and (private) what must be in ``out`` then."""
    draw = random.Random(f"{seed}/{index}")
    family = draw.choice(tuple(COMMANDS))
    shown = family if draw.random() < SURE else draw.choice(tuple(COMMANDS))
    numbers = [draw.randint(10, 99) for _ in range(draw.randint(5, 30))]
    results = {"sort": sorted(numbers), "reverse": numbers[::-1], "count": [len(numbers)], "first": numbers[:1]}
    return task(
        f"{family} list",
        id=f"{family}-{seed % 10**6}-{index}",
        files={"list": "".join(f"{number}\n" for number in numbers)},
        family=family,
        result=[str(number) for number in results[family]],
        demonstration=COMMANDS[shown],
    )


async def done(box: Sandbox, task: Task) -> float:
    """1 when ``out`` holds the result, else 0 (also when there is none)."""
    try:
        text = (await box.files.read("out")).decode()
    except FileNotFoundError:
        return 0.0
    return float(text.split() == task.private["result"])


def demonstrate(task: Task) -> list[Message]:
    """A command (any), its empty output, and the end."""
    call = ToolCall(id="call_0", name="shell", arguments={"command": str(task.private["demonstration"])})
    return [
        Message(role=Role.ASSISTANT, content="", tool_calls=(call,)),
        Message(role=Role.TOOL, content="", tool_call_id="call_0", name="shell"),
        Message(role=Role.ASSISTANT, content="Done"),
    ]


environment = Environment(
    tasks=generated(make_task),
    eval_tasks=generated(make_task, held_out=True),
    workflow=tool_loop(["shell"]),
    rewards=[Reward(done)],
    demonstrate=demonstrate,
)
