"""The order of a step, bounded waits, checkpoints, and going on."""

from __future__ import annotations

import asyncio

import pytest
from bare_methods import GRPO

from tandem.config.sections.engine import TrainSection
from tandem.config.sections.trainer import TrainerSection
from tandem.core.errors import EngineError, RecordError
from tandem.core.events import CheckpointSaved, StepFinished, WaitStalled, WeightsPublished
from tandem.core.types import WeightVersion
from tandem.trainer.batcher import Batcher
from tandem.trainer.loop import Connections, TrainingLoop
from tests.trainer.pieces import CountingEngine, MemorySink, MemoryStore, QueueSource, record

START = WeightVersion(number=0, step=0)


class Run:
    """A loop on small parts. Rollout is one function: each version that comes back releases the next groups."""

    def __init__(
        self, section: TrainerSection, *, groups_per_step: int = 2, rewards=(1.0, 0.0), rests: bool = False
    ) -> None:
        self.sink, self.store, self.engine, self.source = MemorySink(), MemoryStore(), CountingEngine(), QueueSource()
        self.order: list[str] = []
        self.reports: list[int] = []
        self.rewards, self.groups_per_step, self.released = rewards, groups_per_step, 0
        self.loop = TrainingLoop(
            Connections(
                engine=self.engine, source=self.source, sink=self.sink, store=self.store,
                report=self.reports.append, on_version=self.on_version,
                evaluate=self.evaluate, extra=lambda: {"rollout": {"next": self.released}},
                rest=self.rest if rests else None,
            ),
            Batcher(GRPO, TrainSection(), staleness=0, sink=self.sink),
            section, groups_per_step=groups_per_step, stall_warning_s=0.05, give_up_after_s=0.2,
        )  # fmt: skip
        self.release(0)

    def release(self, version: int) -> None:
        for _ in range(self.groups_per_step):
            self.source.queue.put_nowait(record(f"g{self.released}", self.rewards, version=version))
            self.released += 1

    async def on_version(self, version: WeightVersion) -> None:
        self.order.append(f"version {version.number} of step {version.step}")
        self.release(version.number)

    async def rest(self) -> None:
        self.order.append(f"rest before plan {len(self.engine.plans) + 1}, {self.source.queue.qsize()} groups wait")

    async def evaluate(self, step: int) -> None:
        self.order.append(f"evaluate {step}")


def test_steps_checkpoints_and_evaluations_come_in_order() -> None:
    run = Run(TrainerSection(steps=5, checkpoint_every=2, eval_every=3))
    assert asyncio.run(run.loop.run(START)) == 5
    assert [plan.step for plan in run.engine.plans] == [1, 2, 3, 4, 5]
    assert [e.step for e in run.sink.of(StepFinished)] == [1, 2, 3, 4, 5]
    assert [(e.version, e.step) for e in run.sink.of(WeightsPublished)] == [(n, n) for n in range(1, 6)]
    assert [e.step for e in run.sink.of(CheckpointSaved)] == [2, 4, 5]
    assert run.reports == [1, 2, 3, 4, 5]
    assert run.order == [
        "version 1 of step 1", "version 2 of step 2", "version 3 of step 3", "evaluate 3", "version 4 of step 4",
        "version 5 of step 5", "evaluate 5",
    ]  # fmt: skip
    # Saved before the next groups began: a resumed run asks for exactly the groups that step 3 trained on.
    assert run.store.saved[2] == {"rollout": {"next": 4}, "loop": {"step": 2}}
    step = run.sink.of(StepFinished)[0]
    assert step.metrics["entropy"] == 2.0 and step.num_samples == 4 and step.mean_reward == 0.5


def test_a_restored_loop_goes_on_with_the_next_step() -> None:
    run = Run(TrainerSection(steps=3))
    run.loop.restore({"step": 2})
    run.engine.number = 2
    run.source.queue = asyncio.Queue()
    run.release(2)
    assert asyncio.run(run.loop.run(WeightVersion(number=2, step=2))) == 3
    assert [plan.step for plan in run.engine.plans] == [3]


def test_a_step_without_any_group_goes_on_and_trains_nothing() -> None:
    run = Run(TrainerSection(steps=2), rewards=(None, None))
    assert asyncio.run(run.loop.run(START)) == 2
    assert run.engine.plans == []
    step = run.sink.of(StepFinished)[0]
    assert step.loss is None and step.num_samples == 0 and step.mean_reward is None
    assert [e.version for e in run.sink.of(WeightsPublished)] == [1, 2]


def test_stop_ends_after_the_step_in_hand_with_a_checkpoint() -> None:
    run = Run(TrainerSection(steps=50, checkpoint_every=0))

    async def scenario() -> int:
        run.loop.stop()
        return await run.loop.run(START)

    assert asyncio.run(scenario()) == 0
    run.loop._stopping = False

    async def later() -> int:
        original = run.engine.step

        async def step(plan):
            if plan.step == 3:
                run.loop.stop()
            return await original(plan)

        run.engine.step = step
        return await run.loop.run(START)

    assert asyncio.run(later()) == 3
    assert list(run.store.saved) == [3] and run.order[-1] == "version 3 of step 3"


def test_a_wait_names_what_is_missing_and_ends() -> None:
    run = Run(TrainerSection(steps=1), groups_per_step=1)
    run.source.queue = asyncio.Queue()
    with pytest.raises(EngineError, match="episode e7 of group g3"):
        asyncio.run(run.loop.run(START))
    stalls = run.sink.of(WaitStalled)
    assert len(stalls) >= 3 and stalls[0].missing == ["episode e7 of group g3"]
    assert stalls[0].who == "step 1, group 1 of 1" and stalls[0].waited_s < stalls[-1].waited_s


def test_cancelling_the_loop_loses_no_group() -> None:
    run = Run(TrainerSection(steps=1), groups_per_step=1)
    kept = run.source.queue
    run.source.queue = asyncio.Queue()

    async def scenario() -> int:
        task = asyncio.create_task(run.loop.run(START))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        run.source.queue.put_nowait(kept.get_nowait())
        await asyncio.sleep(0)
        return run.source.queue.qsize()

    assert asyncio.run(scenario()) == 1


def test_a_penalty_without_reference_is_refused_at_once() -> None:
    import dataclasses

    run = Run(TrainerSection(steps=1))
    with pytest.raises(EngineError, match="reference"):
        TrainingLoop(
            run.loop._to, Batcher(dataclasses.replace(GRPO, kl_weight=0.1), TrainSection(), staleness=0, sink=run.sink),
            TrainerSection(), groups_per_step=1, stall_warning_s=1.0, give_up_after_s=1.0,
        )  # fmt: skip


def test_a_checkpoint_that_could_not_be_written_ends_the_run() -> None:
    run = Run(TrainerSection(steps=5, checkpoint_every=2))
    run.store.fails_at = 2
    with pytest.raises(RecordError, match="no space left for step 2"):
        asyncio.run(run.loop.run(START))
    assert run.loop.step < 5 and run.store.begun == [2] and not run.sink.of(CheckpointSaved)


def test_the_engine_rests_before_each_step_trains() -> None:
    run = Run(TrainerSection(steps=2), rests=True)
    asyncio.run(run.loop.run(START))
    assert run.order[:3] == ["rest before plan 1, 0 groups wait", "version 1 of step 1",
                             "rest before plan 2, 0 groups wait"]  # fmt: skip
    idle = Run(TrainerSection(steps=1), rewards=(None, None), rests=True)
    asyncio.run(idle.loop.run(START))
    assert not any(each.startswith("rest") for each in idle.order), "nothing is trained"
