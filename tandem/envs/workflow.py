"""The agent loop of one episode: what it may do, and the stock tool loop.

A workflow is a function of a ``Session``. The session is the only door to the model, the tools and the box; it
keeps the history append-only and ends the episode at its limits by raising ``EpisodeOver`` inside the workflow,
which needs no handling there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tandem.core.protocols import Sandbox
from tandem.core.types import FinishReason, Limits, Message, StopReason, Task, ToolResult, Turn
from tandem.envs.tools import Tool, resolve_tools


class EpisodeOver(Exception):
    """A limit ended the episode; not a failure. Let it pass."""

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(stop_reason.value)
        self.stop_reason = stop_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an OpenAI client finds the model of one episode."""

    base_url: str
    api_key: str
    model: str


class Session(Protocol):
    """One running episode, as its workflow sees it."""

    @property
    def task(self) -> Task: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far."""
        ...

    @property
    def box(self) -> Sandbox:
        """Raises ``WorkflowError`` when the environment has no template."""
        ...

    async def ask(self) -> Turn:
        """Let the model speak: one turn, recorded. Raises ``EpisodeOver`` at the limits of turns or context."""
        ...

    async def call_tools(self, turn: Turn) -> tuple[ToolResult, ...]:
        """Run the calls of the last turn in order and show the model their results (and, as results, the calls
        that could not be parsed). Empty when the turn called nothing."""
        ...

    def say(self, *messages: Message) -> None:
        """Append messages (of a user, say) that the model sees at its next turn."""
        ...

    def served(self) -> AbstractAsyncContextManager[Endpoint]:
        """The model behind an OpenAI endpoint, for an agent that brings its own loop: each of its requests becomes
        a turn, with the ids that were sampled; requests that go on from one answer become branches. Sampling is the
        recipe's, whatever the client asks for. Raises ``EpisodeOver`` at the end when a limit refused a request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """An agent loop and the tools it offers. ``max_turns`` caps the recipe's number from below."""

    run: Callable[[Session], Awaitable[StopReason]]
    tools: tuple[Tool, ...] = ()
    max_turns: int | None = None


def tool_loop(
    tools: Sequence[Tool | str | Callable[..., Awaitable[str]]], *, max_turns: int | None = None
) -> Workflow:
    """The stock loop: the model speaks, its calls run in the box, it sees the results, until it answers without
    a call or reaches a limit. ``tools`` are stock names (``python``, ``shell``) or async functions."""
    return Workflow(run=_answer_with_tools, tools=resolve_tools(tools), max_turns=max_turns)


async def _answer_with_tools(session: Session) -> StopReason:
    while True:
        turn = await session.ask()
        results = await session.call_tools(turn)
        if results:
            continue
        if turn.finish_reason is not FinishReason.LENGTH:
            return StopReason.ANSWERED
        num_tokens = len(turn.prompt_ids) + len(turn.completion_ids)
        full = num_tokens >= session.limits.max_context_tokens
        return StopReason.CONTEXT_FULL if full else StopReason.MAX_TOKENS
