"""Agents that bring their own loop: a function or a command that speaks to the model by an OpenAI client.

The agent is not changed for training. It finds the endpoint in its arguments, or in ``OPENAI_BASE_URL``,
``OPENAI_API_KEY`` and ``OPENAI_MODEL``, and everything that the model says to it is recorded exactly.
Owns: how such an agent is started and how its end is read. Refuses: running a command of a model; the agent is the
user's own program, and what it lets the model do is its affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

from tandem.core.errors import WorkflowError
from tandem.core.types import StopReason, Task
from tandem.envs.workflow import Endpoint, Session, Workflow

Agent = Callable[[Task, Endpoint], Awaitable[object]]
KEPT_BYTES = 2000  # of a failed command's error output, for the message
END_S = 2.0  # a cancelled command gets this long to end by itself


def openai_agent(agent: Agent | Sequence[str], *, max_turns: int | None = None) -> Workflow:
    """A workflow that runs ``agent`` once an episode: an async function of the task and its endpoint, or the words of
    a command, which finds the task as JSON (id, messages) on its standard input. An exception or an exit code other
    than 0 is a failure of the environment, never a reward."""

    async def run(session: Session) -> StopReason:
        async with session.served() as endpoint:
            if callable(agent):
                await agent(session.task, endpoint)
            else:
                await _command(agent, session.task, endpoint)
        return StopReason.ANSWERED

    return Workflow(run=run, max_turns=max_turns)


async def _command(words: Sequence[str], task: Task, endpoint: Endpoint) -> None:
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
    }
    shown = {"id": task.id, "messages": [{"role": each.role.value, "content": each.content} for each in task.messages]}
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # its children end with it
        )
    except OSError as error:
        raise WorkflowError(f"the agent {words[0]!r} does not start: {error.strerror or error}") from error
    try:
        _, errors = await process.communicate(json.dumps(shown).encode())
    finally:
        await _end(process)
    if process.returncode:
        tail = errors[-KEPT_BYTES:].decode("utf-8", "replace").strip()
        raise WorkflowError(f"the agent {words[0]!r} ended with code {process.returncode}: {tail}")


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
