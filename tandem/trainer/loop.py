"""The training loop: wait for groups, train, publish, save, evaluate.

Owns: the order of a step, and the only backward arrow of the system, the ``WeightVersion`` it hands on.
Refuses: making groups, tensors, files; those come as protocol objects and callables.
Invariants: every wait is bounded and names what is missing; a checkpoint is taken when all groups handed out
belong to finished steps, so a resumed run goes on where this one was; a step without any group to train on is
counted and changes no weight.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from tandem.algorithms.credit import settle
from tandem.config.sections.trainer import TrainerSection
from tandem.core.errors import EngineError
from tandem.core.events import CheckpointSaved, StepFinished, WaitStalled, WeightsPublished
from tandem.core.protocols import EventSink, TrainEngine, WeightStore
from tandem.core.types import BatchPlan, Floats, StepResult, Trajectory, WeightVersion
from tandem.trainer.batcher import Admitted, Batcher, GroupRecord
from tandem.trainer.scoring import Score, with_old, with_reference, with_values


class GroupSource(Protocol):
    """Where groups come from: the end of the channel that rollout fills."""

    async def get(self) -> GroupRecord:
        """The next terminal group; cancelling loses none."""
        ...

    def missing(self) -> list[str]:
        """Names of what the next group waits for."""
        ...


class Critic(Protocol):
    """A value model that is trained beside the policy."""

    async def values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """The value of what comes before every token."""
        ...

    async def step(self, plan: BatchPlan) -> dict[str, float]:
        """One update towards the returns of the plan's samples; returns metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """What the loop is joined to. ``report`` says what others counted during a step; ``on_version`` hands a
    version to inference and scheduler; ``evaluate`` runs an evaluation of a step; ``extra`` is what a checkpoint
    must hold beyond weights and loop; ``reference`` scores under frozen weights where the algorithm needs it,
    ``critic`` values tokens."""

    engine: TrainEngine
    source: GroupSource
    sink: EventSink
    store: WeightStore
    report: Callable[[int], None]
    on_version: Callable[[WeightVersion], Awaitable[None]]
    evaluate: Callable[[int], Awaitable[None]]
    extra: Callable[[], Mapping[str, object]]
    reference: Score | None = None
    critic: Critic | None = None


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """One result for all updates of a step: means, but the largest of what is a maximum and sums of times."""
    first, *others = results
    if not others:
        return first
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        values = [result.metrics[name] for result in results if name in result.metrics]
        metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return dataclasses.replace(
        first,
        loss=sum(result.loss for result in results) / len(results),
        grad_norm=max(result.grad_norm for result in results),
        num_loss_tokens=sum(result.num_loss_tokens for result in results),
        num_tokens=sum(result.num_tokens for result in results),
        metrics=metrics | {"updates": float(len(results))},
        train_s=sum(result.train_s for result in results),
    )


class TrainingLoop:
    """Reinforcement steps 1 to ``section.steps``. ``step`` is the last finished one."""

    def __init__(
        self,
        connections: Connections,
        batcher: Batcher,
        section: TrainerSection,
        *,
        groups_per_step: int,
        stall_warning_s: float,
        give_up_after_s: float,
    ) -> None:
        if batcher.algorithm.needs_reference and connections.reference is None:
            raise EngineError(f"{batcher.algorithm.name} with a KL penalty needs reference weights, but got none")
        if batcher.algorithm.critic and connections.critic is None:
            raise EngineError(f"{batcher.algorithm.name} needs a critic, but got none")
        self.step = 0
        self._to = connections
        self._batcher = batcher
        self._section = section
        self._groups_per_step = groups_per_step
        self._stall_warning_s = stall_warning_s
        self._give_up_after_s = give_up_after_s
        self._stopping = False

    def state(self) -> dict[str, object]:
        """What a checkpoint holds of the loop itself."""
        return {"step": self.step}

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on after the step of ``state``."""
        self.step = cast(int, state["step"])

    def stop(self) -> None:
        """End after the step in hand, with a checkpoint."""
        self._stopping = True

    async def run(self, version: WeightVersion) -> int:
        """Train until the last step or ``stop``, from the weights ``version``; returns the last finished step."""
        while self.step < self._section.steps and not self._stopping:
            version = await self._one_step(self.step + 1, version)
        return self.step

    async def _one_step(self, step: int, version: WeightVersion) -> WeightVersion:
        started = time.perf_counter()
        records = [await self._next_group(step, index) for index in range(self._groups_per_step)]
        rollout_s = time.perf_counter() - started
        admitted = self._batcher.admit(records, version=version.number)
        result = await self._train(step, admitted) if admitted.samples else None
        publishing = time.perf_counter()
        version = dataclasses.replace(await self._to.engine.publish(), step=step)
        publish_s = time.perf_counter() - publishing
        self.step = step
        cause = self._to.sink.emit(
            StepFinished(
                step=step,
                loss=result.loss if result else None,
                grad_norm=result.grad_norm if result else None,
                learning_rate=result.learning_rate if result else 0.0,
                num_groups=admitted.num_groups,
                num_samples=len(admitted.samples),
                num_loss_tokens=result.num_loss_tokens if result else 0,
                num_tokens=sum(len(sample.trajectory.token_ids) for sample in admitted.samples),
                mean_reward=admitted.mean_reward,
                metrics=admitted.metrics | (result.metrics if result else {}),
                rollout_s=rollout_s,
                train_s=result.train_s if result else 0.0,
                total_s=time.perf_counter() - started,
            )
        )
        self._to.sink.emit(
            WeightsPublished(
                version=version.number,
                step=step,
                digest=version.digest,
                place=version.place,
                publish_s=publish_s,
            ),
            cause=cause,
        )
        self._to.report(step)
        await self._after(step, version, cause)
        return version

    async def _train(self, step: int, admitted: Admitted) -> StepResult:
        algorithm, samples = self._batcher.algorithm, list(admitted.samples)
        if algorithm.needs_reference and self._to.reference is not None:
            samples = await with_reference(samples, self._to.reference)
        if algorithm.needs_old:
            samples = await with_old(samples, self._to.engine.score)
        if self._to.critic is not None:
            samples = await with_values(samples, self._to.critic.values)
        samples = settle(algorithm, samples)
        results = []
        for plan in self._batcher.plans(step, samples):
            result = await self._to.engine.step(plan)
            if self._to.critic is not None:
                result = dataclasses.replace(result, metrics=result.metrics | await self._to.critic.step(plan))
            results.append(result)
        return merge_results(results)

    async def _after(self, step: int, version: WeightVersion, cause: int) -> None:
        """Save before the version is handed on: until then no group of a later step has begun (staleness 0)."""
        last = step == self._section.steps or self._stopping
        every = self._section.checkpoint_every
        if last or (every and step % every == 0):
            await self.save(step, cause)
        await self._to.on_version(version)
        every = self._section.eval_every
        if step == self._section.steps or (every and step % every == 0):
            await self._to.evaluate(step)

    async def save(self, step: int, cause: int = -1) -> None:
        """Write a checkpoint of ``step``; no step may be running."""
        started = time.perf_counter()
        extra = {**self._to.extra(), "loop": self.state()}
        path = await asyncio.to_thread(self._to.store.save, step, extra)
        self._to.sink.emit(
            CheckpointSaved(
                step=step, path=path, digest=self._to.store.digest(step), save_s=time.perf_counter() - started
            ),
            cause=cause,
        )

    async def _next_group(self, step: int, index: int) -> GroupRecord:
        """The next group; says what it waits for whenever ``stall_warning_s`` went by, and gives up at last.

        Raises:
            EngineError: nothing came within ``give_up_after_s``.
        """
        started = time.perf_counter()
        waiting = asyncio.ensure_future(self._to.source.get())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self._stall_warning_s)
                if done:
                    return waiting.result()
                waited_s, missing = time.perf_counter() - started, self._to.source.missing()
                self._to.sink.emit(
                    WaitStalled(
                        who=f"step {step}, group {index + 1} of {self._groups_per_step}",
                        waited_s=waited_s,
                        missing=missing,
                    )
                )
                if waited_s >= self._give_up_after_s:
                    raise EngineError(
                        f"step {step}: no group for {waited_s:.0f} s; missing: {', '.join(missing) or 'nothing named'}",
                        hint="resume the run, or lower rollout.episode_time_s",
                    )
        finally:
            waiting.cancel()
