"""Environments of the tests of whole runs: one in which every episode teaches something, one full of trouble."""

from __future__ import annotations

import dataclasses
import time

from tandem.core.protocols import Sandbox
from tandem.core.types import Limits, Message, Role, StopReason, Task, ToolCall
from tandem.envs.builtin import chores
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import Taskset, generated, task
from tandem.envs.tools import tool
from tandem.envs.workflow import Session, Workflow


# ---- dense: what the model wrote is measured in the box, so that rewards differ and every step moves the weights
async def _write_twice(session: Session) -> StopReason:
    for name in ("first", "second"):
        turn = await session.ask()
        await session.box.files.write(name, turn.message.content)
        counted = await session.box.commands.run(f"wc -c < {name}", timeout_s=30)
        session.say(Message(role=Role.USER, content=f"{counted.stdout.strip()} bytes"))
    return StopReason.ANSWERED


async def small_letters(box: Sandbox) -> float:
    """The share of small letters in what was written."""
    counted = await box.commands.run("cat first second | wc -c; cat first second | tr -cd a-z | wc -c", timeout_s=30)
    total, letters = map(int, counted.stdout.split())
    return letters / total if total else 0.0


dense = Environment(
    tasks=generated(chores.make_task),
    eval_tasks=generated(chores.make_task, held_out=True),
    workflow=Workflow(run=_write_twice),
    rewards=[Reward(small_letters)],
    demonstrate=lambda task: [Message(role=Role.ASSISTANT, content="Done")],
)


# ---- troubled: the agent does, whatever its model says, what its task's family tells
COMMANDS = {
    "good": "echo fine",
    "hang": "sleep 1000",
    "flood": "head -c 1000000000 /dev/zero",
    "bomb": "b() { b | b & b; }; b",
}
FAMILIES = ("broken workflow", "endless reward", "broken reward", *COMMANDS, "stubborn", "broken tool")
BROKEN_TASK = 3


@tool
async def stubborn(text: str) -> str:
    """Never returns, and blocks nobody."""
    import asyncio

    await asyncio.Event().wait()
    return ""


@tool
async def broken(text: str) -> str:
    """Raises."""
    raise LookupError("this tool is broken")


def _make_task(seed: int, index: int) -> Task:
    if index == BROKEN_TASK:
        raise ZeroDivisionError("this task is broken")
    family = FAMILIES[(index - (index > BROKEN_TASK)) % len(FAMILIES)]
    limits = Limits(
        max_turns=1,
        max_turn_tokens=8,
        max_context_tokens=256,
        tool_time_s=60 if family == "flood" else 1,  # what hangs must not wait, what ends by itself must get its time
        episode_time_s=120,
        reward_time_s=1 if family == "endless reward" else 60,
    )
    return dataclasses.replace(task(f"Be {family}.", id=f"{family}-{index}", family=family), limits=limits)


async def _do_it(session: Session) -> StopReason:
    family = session.task.private["family"]
    turn = await session.ask()
    if family == "broken workflow":
        raise KeyError("this workflow is broken")
    name, arguments = "shell", {"command": COMMANDS.get(str(family), "echo fine")}
    if family in ("stubborn", "broken tool"):
        name, arguments = str(family).split()[0], {"text": "please"}
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    made = dataclasses.replace(turn, message=dataclasses.replace(turn.message, tool_calls=(call,)), tool_results=())
    turns = session.turns
    assert isinstance(turns, list)
    turns[-1] = made  # as if the model had called it
    await session.call_tools(made)
    if family == "bomb":  # its box is still of use
        assert (await session.box.commands.run("echo alive", timeout_s=20)).stdout == "alive\n"
    return StopReason.ANSWERED


def judge(task: Task) -> float:
    """Loops for ever, or raises, where the task says so."""
    while task.private["family"] == "endless reward":
        time.sleep(0)
    if task.private["family"] == "broken reward":
        raise LookupError("this reward is broken")
    return 1.0


troubled = Environment(
    tasks=Taskset(_make_task),
    workflow=Workflow(run=_do_it, tools=chores.environment.workflow.tools + (stubborn, broken)),
    rewards=[Reward(judge)],
)
