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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from tandem.config.sections.trainer import TrainerSection
from tandem.core.errors import EngineError
from tandem.core.events import StepFinished, WaitStalled, WarningRaised, WeightsPublished
from tandem.core.protocols import EventSink, TrainEngine, WeightStore
from tandem.core.types import StepResult, WeightVersion
from tandem.trainer.batcher import Admitted, Batcher, GroupRecord
from tandem.trainer.mismatch import WHERE, GapAlarm
from tandem.trainer.saving import Saver
from tandem.trainer.scoring import Judge, Score, mean_verdict
from tandem.trainer.update import Critic, check_roles, update


class GroupSource(Protocol):
    """Where groups come from: the end of the channel that rollout fills."""

    async def get(self) -> GroupRecord:
        """The next terminal group; cancelling loses none."""
        ...

    def missing(self) -> list[str]:
        """Names of what the next group waits for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """What the loop is joined to. ``report`` says what others counted during a step; ``on_version`` hands a
    version to inference and scheduler; ``evaluate`` runs an evaluation of a step; ``extra`` is what a checkpoint
    must hold beyond weights and loop; ``reference`` scores under frozen weights where the algorithm needs it,
    ``critic`` values tokens, ``judge`` adds a reward model's score to the rewards, ``rest`` lets the engine give
    memory back before a step trains."""

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
    judge: Judge | None = None
    rest: Callable[[], Awaitable[None]] | None = None
    alarm: GapAlarm | None = None


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
        check_roles(batcher.algorithm, connections.reference, connections.critic)
        self.step = 0
        self._to = connections
        self._saver = Saver(connections.store, connections.sink)
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
        """Train until the last step or ``stop``, from the weights ``version``; returns the last finished step, when its
        checkpoint is on the disk.

        Raises:
            RecordError: a checkpoint could not be written.
        """
        async with self._saver:
            while self.step < self._section.steps and not self._stopping:
                version = await self._one_step(self.step + 1, version)
                await self._saver.check()
        return self.step

    async def _one_step(self, step: int, version: WeightVersion) -> WeightVersion:
        started = time.perf_counter()
        records = [await self._next_group(step, index) for index in range(self._groups_per_step)]
        rollout_s = time.perf_counter() - started
        if self._to.judge is not None:
            records = await self._to.judge.judge(records)
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
                metrics=admitted.metrics | mean_verdict(records) | (result.metrics if result else {}),
                rollout_s=rollout_s,
                train_s=result.train_s if result else 0.0,
                total_s=time.perf_counter() - started,
            )
        )
        if result and self._to.alarm is not None and (said := self._to.alarm.hear(result.metrics)) is not None:
            self._to.sink.emit(WarningRaised(where=WHERE, message=f"step {step}: {said}"), cause=cause)
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
        to = self._to
        if to.rest is not None:
            await to.rest()
        return await update(
            step,
            admitted.samples,
            self._batcher,
            train=to.engine.step,
            score=to.engine.score,
            reference=to.reference,
            critic=to.critic,
        )

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
        """Take a checkpoint of ``step``; no step may be running. It is written while training goes on."""
        await self._saver.begin(step, {**self._to.extra(), "loop": self.state()}, cause)

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
