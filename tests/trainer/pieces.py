"""Small real parts for trainer tests: groups with trajectories, a sink that keeps events, an engine that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tandem.core.errors import RecordError
from tandem.core.events import AnyEvent
from tandem.core.types import (
    BatchPlan,
    Episode,
    Failure,
    FailureKind,
    Floats,
    Group,
    StepResult,
    Task,
    Trajectory,
    WeightVersion,
    floats,
    ids,
    mask,
)
from tandem.trainer.batcher import GroupRecord

E = TypeVar("E")


class MemorySink:
    """Keeps events in order."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def put_blob(self, data: bytes) -> str:
        return str(len(data))

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


class CountingEngine:
    """Takes plans and counts versions; trains nothing."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.plans: list[BatchPlan] = []

    async def step(self, plan: BatchPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(
            step=plan.step, loss=0.5, grad_norm=1.0, learning_rate=0.1, num_loss_tokens=plan.num_loss_tokens,
            num_tokens=0, metrics={"entropy": 2.0}, train_s=0.0,
        )  # fmt: skip

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        return [floats([-2.0] * len(t.token_ids)) for t in trajectories]

    async def publish(self) -> WeightVersion:
        self.number += 1
        return WeightVersion(number=self.number, step=0)

    async def close(self) -> None: ...


class MemoryStore:
    """Checkpoints in a dictionary."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, object]] = {}
        self.begun: list[int] = []
        self.fails_at = -1

    def begin(self, step: int, extra: Mapping[str, object]) -> Future[str]:
        self.begun.append(step)
        future: Future[str] = Future()
        if step == self.fails_at:
            future.set_exception(RecordError(f"no space left for step {step}"))
        else:
            self.saved[step] = dict(extra)
            future.set_result(f"memory/{step}")
        return future

    def latest(self) -> int | None:
        return max(self.saved, default=None)

    def restore(self, step: int) -> Mapping[str, object]:
        return self.saved[step]

    def digest(self, step: int) -> str:
        return f"digest-{step}"


class QueueSource:
    """The end of a channel."""

    def __init__(self, records: Sequence[GroupRecord] = ()) -> None:
        self.queue: asyncio.Queue[GroupRecord] = asyncio.Queue()
        for record in records:
            self.queue.put_nowait(record)

    async def get(self) -> GroupRecord:
        return await self.queue.get()

    def missing(self) -> list[str]:
        return ["episode e7 of group g3"]


def trajectory(
    episode_id: str, *, prompt: Sequence[int] = (1, 2, 3), answer: Sequence[int] = (4, 5), version: int = 0
) -> Trajectory:
    p, a = len(prompt), len(answer)
    return Trajectory(
        episode_id=episode_id, group_id="g", token_ids=ids([*prompt, *answer]), loss_mask=mask([0] * p + [1] * a),
        logprobs=floats([0.0] * p + [-1.0] * a), versions=ids([-1] * p + [version] * a), num_prompt_tokens=p,
    )  # fmt: skip


def record(
    name: str,
    rewards: Sequence[float | None],
    *,
    version: int = 0,
    kind: FailureKind = FailureKind.SANDBOX,
    prompt: Sequence[int] = (1, 2, 3),
) -> GroupRecord:
    """A terminal group; episode i's answer has i + 1 tokens of its own."""
    failure = Failure(kind=kind, detail="", retryable=False)
    episodes = tuple(
        Episode(
            id=f"{name}.{index}", task_id=name, group_id=name, index=index, attempt=0, seed=0, turns=(),
            reward=reward, failure=failure if reward is None else None,
        )
        for index, reward in enumerate(rewards)
    )  # fmt: skip
    trajectories = tuple(
        trajectory(e.id, prompt=prompt, answer=[10 * (e.index + 1) + t for t in range(e.index + 1)], version=version)
        for e in episodes
        if e.reward is not None
    )
    return Group(id=name, task=Task(id=name, messages=()), episodes=episodes), trajectories
