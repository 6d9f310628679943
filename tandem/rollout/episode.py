"""One attempt at a task, from an empty box to a scored or failed ``Episode``.

Owns: the box's life, the deadline, and the one table that says which exception is which failure.
Invariants: a failure is typed and never a reward; whatever happens, cancellation included, the box is killed
before this ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import EngineError, PromptTooLong, SandboxError, TandemError, WorkflowError
from tandem.core.events import RewardFinished, WarningRaised
from tandem.core.protocols import EventSink, Sandbox, SandboxService
from tandem.core.types import Episode, Failure, FailureKind, Limits, Score, StopReason, Task, Turn
from tandem.envs.environment import Environment
from tandem.envs.foreign import describe
from tandem.envs.reward import score, total
from tandem.envs.reward_pool import RewardPool
from tandem.envs.workflow import EpisodeOver
from tandem.rollout.gateway import Gateway
from tandem.rollout.policy import Policy
from tandem.rollout.session import EpisodeSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What every attempt of a lane shares."""

    environment: Environment
    policy: Policy
    sandboxes: SandboxService
    sandbox_spec: SandboxSpec
    rewards: RewardPool
    sink: EventSink
    limits: Limits
    gateway: Gateway | None = None

    def limits_of(self, task: Task) -> Limits:
        """The task's own limits or the recipe's, within the model's context and the workflow's turns."""
        limits = task.limits or self.limits
        turns = self.environment.workflow.max_turns
        return dataclasses.replace(
            limits,
            max_context_tokens=min(limits.max_context_tokens, self.limits.max_context_tokens),
            max_turns=limits.max_turns if turns is None else min(limits.max_turns, turns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Which episode this is. ``cause`` is the event that started it."""

    episode_id: str
    group_id: str
    task: Task
    index: int
    attempt: int
    seed: int
    cause: int


@dataclass(slots=True)
class _Progress:
    """What is known so far; becomes the episode whenever it ends."""

    turns: Sequence[Turn] = ()
    scores: tuple[Score, ...] = ()
    stop_reason: StopReason | None = None
    lease_s: float = 0.0
    reward_s: float = 0.0


def failure_of(error: BaseException) -> Failure:
    """The taxonomy: which exception, raised inside an episode, is which failure."""
    if not isinstance(error, TandemError):
        return Failure(kind=FailureKind.ENVIRONMENT, detail=describe(error), retryable=WorkflowError.retryable)
    if isinstance(error, PromptTooLong):
        kind = FailureKind.PROMPT_TOO_LONG
    elif isinstance(error, EngineError):
        kind = FailureKind.POLICY
    elif isinstance(error, SandboxError):
        kind = FailureKind.SANDBOX
    else:
        kind = FailureKind.ENVIRONMENT
    return Failure(kind=kind, detail=error.message, retryable=error.retryable)


async def run_attempt(attempt: Attempt, around: Surroundings) -> Episode:
    """Run one attempt to its end. Raises nothing but cancellation."""
    start = time.perf_counter()
    progress = _Progress()
    reward, failure = None, None
    box: Sandbox | None = None
    try:
        limits = around.limits_of(attempt.task)
        deadline = asyncio.timeout(limits.episode_time_s)
        try:
            async with deadline:
                box = await _lease(attempt.task, around, progress)
                await _work(attempt, around, limits, box, progress)
        except TimeoutError:
            if not deadline.expired():
                raise
            detail = f"not finished within {limits.episode_time_s:g} s, after {len(progress.turns)} turns"
            failure = Failure(kind=FailureKind.EPISODE_TIMEOUT, detail=detail, retryable=False)
        if failure is None:
            reward, failure = await _judge(attempt, around, limits, box, progress)
    except (Exception, SystemExit) as error:  # the supervisor of an episode: everything it raises is a typed outcome
        failure = failure_of(error)
    finally:
        if box is not None:
            await _kill(box, around)
    return _episode(attempt, progress, reward=reward, failure=failure, total_s=time.perf_counter() - start)


def cancelled(attempt: Attempt) -> Episode:
    """The record of an attempt that was stopped from outside."""
    failure = Failure(kind=FailureKind.CANCELLED, detail="stopped from outside", retryable=False)
    return _episode(attempt, _Progress(), reward=None, failure=failure, total_s=0.0)


async def _lease(task: Task, around: Surroundings, progress: _Progress) -> Sandbox | None:
    if around.environment.template is None:
        return None
    start = time.perf_counter()
    box = await around.sandboxes.create(around.sandbox_spec)
    try:
        for path, text in task.files.items():
            await box.files.write(path, text)
    except BaseException:
        await box.kill()
        raise
    progress.lease_s = time.perf_counter() - start
    return box


async def _work(
    attempt: Attempt, around: Surroundings, limits: Limits, box: Sandbox | None, progress: _Progress
) -> None:
    workflow = around.environment.workflow
    session = EpisodeSession(
        episode_id=attempt.episode_id,
        group_id=attempt.group_id,
        task=attempt.task,
        limits=limits,
        seed=attempt.seed,
        policy=around.policy,
        tools=workflow.tools,
        box=box,
        sink=around.sink,
        cause=attempt.cause,
        gateway=around.gateway,
    )
    progress.turns = session.turns
    try:
        stop_reason: object = await workflow.run(session)  # of a user, who may have forgotten to return one
    except EpisodeOver as over:
        stop_reason = over.stop_reason
    if not isinstance(stop_reason, StopReason):
        raise WorkflowError(f"the workflow returned {stop_reason!r}, not a StopReason")
    if not session.turns:
        raise WorkflowError("the workflow ended without one turn of the model")
    progress.stop_reason = stop_reason


async def _judge(
    attempt: Attempt, around: Surroundings, limits: Limits, box: Sandbox | None, progress: _Progress
) -> tuple[float | None, Failure | None]:
    start = time.perf_counter()
    seen = _episode(attempt, progress, reward=None, failure=None, total_s=0.0)
    try:
        for reward in around.environment.rewards:
            verdict = await score(
                reward, episode=seen, task=attempt.task, box=box, pool=around.rewards, time_s=limits.reward_time_s
            )
            made = verdict.score
            progress.scores = (*progress.scores, made)
            around.sink.emit(
                RewardFinished(
                    episode_id=attempt.episode_id,
                    name=made.name,
                    value=made.value,
                    failure=made.failure.value if made.failure else None,
                    duration_s=verdict.duration_s,
                ),
                cause=attempt.cause,
            )
    finally:
        progress.reward_s = time.perf_counter() - start
    return total(progress.scores)


async def _kill(box: Sandbox, around: Surroundings) -> None:
    try:
        await box.kill()
    except SandboxError as error:  # the episode's outcome stands; the service sweeps what is left
        around.sink.emit(WarningRaised(where=f"kill of sandbox {box.id}", message=error.message))


def _episode(
    attempt: Attempt, progress: _Progress, *, reward: float | None, failure: Failure | None, total_s: float
) -> Episode:
    turns = tuple(progress.turns)
    return Episode(
        id=attempt.episode_id,
        task_id=attempt.task.id,
        group_id=attempt.group_id,
        index=attempt.index,
        attempt=attempt.attempt,
        seed=attempt.seed,
        turns=turns,
        scores=progress.scores,
        reward=reward,
        stop_reason=progress.stop_reason,
        failure=failure,
        final_message=turns[-1].message.content if turns else "",
        lease_s=progress.lease_s,
        model_s=sum(turn.model_s for turn in turns),
        tools_s=sum(turn.tools_s for turn in turns),
        reward_s=progress.reward_s,
        total_s=total_s,
    )
