"""One training run from its first evaluation to its exported model.

Owns: the phases (before, warm-up, reinforcement, export), and where a resumed run enters them. Refuses: signals,
folders and exit codes (``run``). Invariants: every phase ends in the log before the next begins; supervised steps
are never counted as reinforcement; a resumed run does not evaluate twice what the log already holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tandem.algorithms.credit import demonstration
from tandem.algorithms.spec import resolve
from tandem.app.build import Parts, export_model, samples_exactly
from tandem.app.preflight import demonstrations
from tandem.app.ranks import ranks_of, train_engine
from tandem.app.roles import critic_of, judge_of, reference_of, score_of
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.core.events import EngineReported
from tandem.core.protocols import EventSink
from tandem.core.types import Sample, WeightVersion
from tandem.core.wire import derive_seed
from tandem.engine.train.checkpoint import CheckpointStore, complete_steps
from tandem.engine.train.ranks import RankGroup
from tandem.rollout.assemble import demonstrate
from tandem.trainer.batcher import Batcher
from tandem.trainer.loop import Connections, TrainingLoop
from tandem.trainer.mismatch import GapAlarm
from tandem.trainer.warmup import warm_up

BEFORE, WARMED, FINAL = "before", "after warm-up", "after reinforcement"


class TrainingSession:
    """A run's parts, its folder, and what the log says was already done (``evaluated``: names)."""

    def __init__(self, parts: Parts, folder: Path, sink: EventSink, *, evaluated: frozenset[str]) -> None:
        self._parts = parts
        self._folder = folder
        self._sink = sink
        self._evaluated = evaluated
        self._reported = parts.engine.stats()

    async def run(self) -> Path:
        """Run every phase that is not done yet; returns the exported model folder."""
        async with ranks_of(self._parts.recipe) as ranks:
            return await self._run(ranks)

    async def _run(self, ranks: RankGroup | None) -> Path:
        recipe, parts = self._parts.recipe, self._parts
        fresh = not complete_steps(self._checkpoints)
        if fresh:
            await self._evaluate(BEFORE, 0)
            if recipe.warmup.steps:
                await self._warm_up(ranks)
                await self._evaluate(WARMED, 0)
        loop, store = await self._make_loop(ranks)
        if fresh:
            await loop.save(0)
        else:
            await self._restore(loop, store)
        version = WeightVersion(number=parts.weights.version, step=loop.step)
        await parts.engine.load(version)
        self._reported = parts.engine.stats()
        if loop.step < recipe.trainer.steps:
            parts.rollout.start(version, last_step=recipe.trainer.steps)
        await loop.run(version)
        await self._evaluate(FINAL, loop.step)
        return self.export()

    async def _restore(self, loop: TrainingLoop, store: CheckpointStore) -> None:
        latest = store.latest()
        assert latest is not None
        extra = await asyncio.to_thread(store.restore, latest)
        loop.restore(cast("Mapping[str, object]", extra["loop"]))
        self._parts.rollout.restore(cast("Mapping[str, object]", extra["rollout"]))
        every = self._parts.recipe.trainer.eval_every
        if loop.step and every and loop.step % every == 0:  # it follows the checkpoint, so it may be missing
            await self._evaluate_step(loop.step)

    async def _make_loop(self, ranks: RankGroup | None) -> tuple[TrainingLoop, CheckpointStore]:
        recipe, parts = self._parts.recipe, self._parts
        algorithm = resolve(recipe.algorithm)
        engine = await train_engine(
            recipe, parts.weights, parts.compute, ranks, algorithm=algorithm, total_steps=recipe.trainer.steps
        )
        reference, critic = reference_of(parts, algorithm), critic_of(parts, algorithm)
        store = CheckpointStore(
            self._checkpoints,
            parts.weights,
            engine.optimizer,
            keep=recipe.trainer.keep_checkpoints,
            reference=None if algorithm.teacher else reference,
            critic=critic,
        )
        loop = TrainingLoop(
            Connections(
                engine=engine,
                source=parts.rollout,
                sink=self._sink,
                store=store,
                report=self._report,
                on_version=parts.load,
                evaluate=self._evaluate_step,
                extra=lambda: {"rollout": parts.rollout.state()},
                reference=score_of(parts, reference),
                critic=critic,
                judge=judge_of(parts),
                rest=parts.engine.sleep if recipe.engine.train.hand_over else None,
                alarm=GapAlarm(
                    recipe.trainer.gap_alarm, is_exact=samples_exactly(recipe, parts.weights.model),
                    is_corrected=algorithm.needs_old,
                ),
            ),
            Batcher(algorithm, recipe.engine.train, staleness=recipe.rollout.staleness, sink=self._sink),
            recipe.trainer,
            groups_per_step=recipe.rollout.groups_per_step,
            stall_warning_s=recipe.rollout.stall_warning_s,
            give_up_after_s=3 * recipe.rollout.episode_time_s,
        )
        return loop, store

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    def export(self) -> Path:
        """Write the weights as a Hugging Face folder ``model`` in the run folder (a newer one replaces it)."""
        return export_model(self._parts.weights.model, self._folder, base=self._parts.ready.model.path)

    async def _warm_up(self, ranks: RankGroup | None) -> None:
        recipe, parts = self._parts.recipe, self._parts
        if not recipe.warmup.steps:
            return
        spec = resolve(AlgorithmSection(name="sft"))
        engine = await train_engine(
            recipe,
            parts.weights,
            parts.compute,
            ranks,
            algorithm=spec,
            total_steps=recipe.warmup.steps,
            optimizer=recipe.optimizer.model_copy(update={"learning_rate": recipe.warmup.learning_rate}),
        )
        await warm_up(
            engine,
            await self._demonstrations(),
            spec,
            section=recipe.warmup,
            train=recipe.engine.train,
            seed=recipe.trainer.seed,
            sink=self._sink,
            on_version=parts.load,
        )

    async def _demonstrations(self) -> list[Sample]:
        """Thousands take seconds, so the loop gets its turn in between."""
        recipe, ready = self._parts.recipe, self._parts.ready
        tools = [tool.spec for tool in ready.environment.workflow.tools]
        count = recipe.warmup.steps * recipe.warmup.batch_size
        seed = derive_seed("demonstrations", recipe.trainer.seed)
        samples = []
        for number, messages in enumerate(demonstrations(ready.environment, count, seed)):
            made = demonstrate(messages, tools, ready.model.renderer, name=f"demonstration-{number}")
            samples.append(demonstration(made.episode_id, made.token_ids, made.loss_mask))
            if not number % 16:
                await asyncio.sleep(0)
        return samples

    def _report(self, step: int) -> None:
        """The engine's counters since the report before, for the event of this step."""
        now, before = self._parts.engine.stats(), self._reported
        self._reported = now
        self._sink.emit(
            EngineReported(
                step=step,
                prompt_tokens=now.prompt_tokens - before.prompt_tokens,
                cached_tokens=now.cached_tokens - before.cached_tokens,
                generated_tokens=now.generated_tokens - before.generated_tokens,
                busy_s=now.busy_s - before.busy_s,
            )
        )

    async def _evaluate_step(self, step: int) -> None:
        if step < self._parts.recipe.trainer.steps:  # the last one has its own name
            await self._evaluate(f"step {step}", step)
            self._reported = self._parts.engine.stats()  # what an evaluation sampled is no step's

    async def _evaluate(self, name: str, step: int) -> None:
        if name not in self._evaluated and (outcome := await self._parts.evaluate(name, step)) is not None:
            self._sink.emit(outcome)
