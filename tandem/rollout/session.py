"""The workflow's door to model, tools and box, for one attempt.

Owns: the append-only history and the limits of turns and context. Invariant: a later prompt is the earlier prompt,
the completion, and newly rendered messages, in ids; nothing that is in the history is tokenised again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tandem.core.errors import PromptTooLong, WorkflowError
from tandem.core.events import ToolFinished, TurnFinished
from tandem.core.protocols import EventSink, Sandbox
from tandem.core.types import (
    Ids,
    Limits,
    Message,
    Role,
    SamplingParams,
    StopReason,
    Task,
    ToolCall,
    ToolFailure,
    ToolResult,
    Turn,
)
from tandem.core.wire import derive_seed
from tandem.envs.tools import Tool
from tandem.envs.workflow import Endpoint, EpisodeOver
from tandem.rollout.gateway import Gateway
from tandem.rollout.policy import Policy, Reply


class EpisodeSession:
    """Implements ``envs.workflow.Session``."""

    def __init__(
        self,
        *,
        episode_id: str,
        group_id: str,
        task: Task,
        limits: Limits,
        seed: int,
        policy: Policy,
        tools: Sequence[Tool],
        box: Sandbox | None,
        sink: EventSink,
        cause: int,
        gateway: Gateway | None = None,
    ) -> None:
        self.task = task
        self.limits = limits
        self.turns: list[Turn] = []
        self.last_event = cause
        self._episode_id = episode_id
        self._group_id = group_id
        self._seed = seed
        self._policy = policy
        self._tools = {tool.spec.name: tool for tool in tools}
        self._specs = [tool.spec for tool in tools]
        self._box = box
        self._sink = sink
        self._unseen: list[Message] = []  # said since the last turn
        self._reply: Reply | None = None
        self._turn_event = cause
        self._gateway = gateway

    @property
    def box(self) -> Sandbox:
        if self._box is None:
            raise WorkflowError("the workflow uses the box, but the environment has template=None")
        return self._box

    def say(self, *messages: Message) -> None:
        self._unseen.extend(messages)

    async def ask(self) -> Turn:
        if len(self.turns) >= self.limits.max_turns:
            raise EpisodeOver(StopReason.MAX_TURNS)
        number = len(self.turns)
        try:
            reply = await self._policy.reply(
                self._next_prompt(),
                self._specs,
                request_id=f"{self._episode_id}/{number}",
                seed=derive_seed(self._seed, number),
                max_tokens=self.limits.max_turn_tokens,
                max_context_tokens=self.limits.max_context_tokens,
                group=self._group_id,
            )
        except PromptTooLong as error:
            if self._reply is not None:
                raise EpisodeOver(StopReason.CONTEXT_FULL) from error
            raise
        self._unseen.clear()
        self._reply = reply
        self._took(reply.turn, reply.num_cached_tokens)
        return reply.turn

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Endpoint]:
        if self._gateway is None:
            raise WorkflowError("this process serves no endpoint for agents")
        sampling = self._policy.sampling
        params = SamplingParams(
            max_tokens=self.limits.max_turn_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        async with self._gateway.serve(
            self._episode_id,
            group=self._group_id,
            priority=sampling.priority,
            params=params,
            seed=self._seed,
            limits=self.limits,
            on_turn=self._took,
        ) as served:
            try:
                yield served.endpoint
            except Exception:
                # An agent whose request was refused at a limit ends in an error of its own making.
                if served.over() is None:
                    raise
        if (over := served.over()) is not None:
            raise EpisodeOver(over)

    def _took(self, turn: Turn, num_cached_tokens: int) -> None:
        number = len(self.turns)
        self.turns.append(turn)
        self._turn_event = self.last_event = self._sink.emit(
            TurnFinished(
                episode_id=self._episode_id,
                turn=number,
                num_prompt_tokens=len(turn.prompt_ids),
                num_cached_tokens=num_cached_tokens,
                num_completion_tokens=len(turn.completion_ids),
                finish_reason=turn.finish_reason.value,
                version_first=turn.versions[0] if turn.versions else -1,
                version_last=turn.versions[-1] if turn.versions else -1,
                model_s=turn.model_s,
            ),
            cause=self.last_event,
        )

    async def call_tools(self, turn: Turn) -> tuple[ToolResult, ...]:
        if not self.turns or turn is not self.turns[-1]:
            raise WorkflowError("call_tools takes the turn that the last ask returned, once")
        start = time.perf_counter()
        results: list[ToolResult] = []
        for call in turn.message.tool_calls:
            results.append(await self._call(call))
            self._record(results[-1])
        for unparseable in turn.tool_results:
            results.append(unparseable)
            self._record(unparseable)
        # Replaced even if nothing was called, so that a second call for the same turn is refused.
        self.turns[-1] = dataclasses.replace(
            turn, tool_results=tuple(results), tools_s=time.perf_counter() - start if results else 0.0
        )
        self.say(
            *(
                Message(role=Role.TOOL, content=result.content, tool_call_id=result.call_id, name=result.name)
                for result in results
            )
        )
        return tuple(results)

    async def _call(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is not None:
            return await tool.call(call, box=self._box, time_s=self.limits.tool_time_s)
        known = ", ".join(self._tools) or "none"
        return ToolResult(
            call_id=call.id,
            name=call.name,
            content=f"no tool named {call.name}; tools: {known}",
            failure=ToolFailure.UNKNOWN_TOOL,
        )

    def _record(self, result: ToolResult) -> None:
        content = result.content.encode("utf-8", "replace")
        self.last_event = self._sink.emit(
            ToolFinished(
                episode_id=self._episode_id,
                turn=len(self.turns) - 1,
                tool=result.name,
                failure=result.failure.value if result.failure else None,
                output_digest=self._sink.put_blob(content),
                output_bytes=len(content),
                duration_s=result.duration_s,
            ),
            cause=self._turn_event,
        )

    def _next_prompt(self) -> Ids:
        renderer = self._policy.renderer
        if self._reply is None:
            return renderer.prompt([*self.task.messages, *self._unseen], self._specs)
        if not self._unseen:
            raise WorkflowError("the workflow asked again without anything new for the model to see")
        turn = self._reply.turn
        added = renderer.continuation(turn.completion_ids, self._unseen)
        return turn.prompt_ids + turn.completion_ids + added
