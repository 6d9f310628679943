"""Small jobs that cannot be done without the box: look a number up in a file, count lines, compute a product.

The answer stands in files of the box, or must be computed there. Every task is made from (seed, index) alone.
The model must write a tool call in the right form, read its output, and close with ``Answer: <result>``.
"""

from __future__ import annotations

import random
import re
from typing import cast

from tandem.core.types import Episode, Message, Role, Task, ToolCall
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop

SYSTEM = "Solve the task with a tool. After its output reply: Answer: result"
GOODS = ("apples", "plums", "pears", "figs", "kiwis", "limes", "grapes", "melons", "dates", "olives", "nuts", "beans")
# A family's share of the tasks. Looking up is the hardest to begin with, so it comes up twice as often.
FAMILIES = ("lookup", "lookup", "product", "count")


def make_task(seed: int, index: int) -> Task:
    """Task number ``index``: its question, its files, and (private) its family, answer and a way to find it."""
    draw = random.Random(f"{seed}/{index}")
    family = draw.choice(FAMILIES)
    files: dict[str, str] = {}
    if family == "product":
        left, right = draw.randint(11, 999), draw.randint(11, 999)
        question, answer = f"What is {left} * {right}?", left * right
        tool, call, output = "python", f"print({left} * {right})", str(answer)
    elif family == "count":
        name, answer = draw.choice(("log.txt", "notes.txt", "data.txt")), draw.randint(3, 40)
        files[name] = "".join(f"line {number}\n" for number in range(answer))
        question = f"How many lines are in {name}?"
        tool, call, output = "shell", f"wc -l < {name}", str(answer)
    else:
        name, goods = draw.choice(("stock.txt", "store.txt", "list.txt")), draw.sample(GOODS, 6)
        amounts = {each: draw.randint(10, 99) for each in goods}
        files[name] = "".join(f"{each}: {amount}\n" for each, amount in amounts.items())
        wanted = draw.choice(goods)
        question, answer = f"How many {wanted} does {name} list?", amounts[wanted]
        tool, call, output = "shell", f"grep {wanted} {name}", f"{wanted}: {answer}"
    return task(
        question,
        id=f"{family}-{seed % 10**6}-{index}",
        system=SYSTEM,
        files=files,
        family=family,
        answer=str(answer),
        demonstration=[tool, call, output],
    )


def correct(episode: Episode, task: Task) -> float:
    """1 when a tool was used and the last line of the last message is the answer, else 0."""
    used_tool = any(result.failure is None for turn in episode.turns for result in turn.tool_results)
    lines = episode.final_message.strip().splitlines() or [""]
    stated = re.fullmatch(r"Answer: (\S+)", lines[-1].strip())
    return float(used_tool and stated is not None and stated[1] == task.private["answer"])


def demonstrate(task: Task) -> list[Message]:
    """The shortest good episode: one call, its output, the answer."""
    tool, call, output = cast("tuple[str, str, str]", task.private["demonstration"])
    argument = {"python": "code", "shell": "command"}[tool]
    calls = (ToolCall(id="call_0", name=tool, arguments={argument: call}),)
    return [
        Message(role=Role.ASSISTANT, content="", tool_calls=calls),
        Message(role=Role.TOOL, content=output, tool_call_id="call_0", name=tool),
        Message(role=Role.ASSISTANT, content=f"Answer: {task.private['answer']}"),
    ]


environment = Environment(
    tasks=generated(make_task),
    eval_tasks=generated(make_task, held_out=True),
    workflow=tool_loop(["python", "shell"]),
    rewards=[Reward(correct)],
    demonstrate=demonstrate,
)
