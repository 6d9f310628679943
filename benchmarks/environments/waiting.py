"""Agents that wait: turns of the model with a tool between them that does nothing but take its time, in the box.

The tool is called after every turn but the last, whatever the model says: a small model would not call it reliably,
and what is measured is who waits for whom.
"""

from __future__ import annotations

from tandem.core.types import Message, Role, StopReason, Task, ToolCall
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.tools import resolve_tools
from tandem.envs.workflow import Session, Workflow

PROMPT = "Find out what is wrong with the pump in the cellar. Use the tool, look at what it says, and go on."


def make_task(seed: int, index: int) -> Task:
    return task(PROMPT, id=f"wait-{seed % 10**6}-{index}")


def environment(tool_calls: int = 3, tool_s: float = 0.2) -> Environment:
    """``tool_s`` 0: the tool answers at once, without the box."""
    tools = resolve_tools(["shell"])

    async def run(session: Session) -> StopReason:
        for number in range(tool_calls):
            await session.ask()
            output = "ok"
            if tool_s:
                call = ToolCall(id=f"call_{number}", name="shell", arguments={"command": f"sleep {tool_s}; echo ok"})
                result = await tools[0].call(call, box=session.box, time_s=session.limits.tool_time_s)
                assert result.failure is None, result.content
                output = result.content
            session.say(Message(role=Role.TOOL, content=output, tool_call_id=f"call_{number}", name="shell"))
        await session.ask()
        return StopReason.ANSWERED

    return Environment(tasks=generated(make_task), workflow=Workflow(run=run, tools=tools), rewards=[Reward(one)])


def one() -> float:
    return 1.0
