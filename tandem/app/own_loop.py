"""A training run whose loop is the user's: ``async with Trainer("recipe.toml") as trainer: ...``.

Owns: one object over the parts of a recipe, with a verb for each thing a loop does; numbers come back. Refuses: the
loop itself (which tasks, how often, when to stop, when to save). Invariants: ``train`` is the step of ``tandem train``,
normaliser and roles included, whatever the loss; when it returns the next token is sampled from the new weights; a loop
that goes on from a checkpoint is, bit by bit, the one that was not interrupted; nothing is left when the context ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tandem.algorithms.credit import credited
from tandem.algorithms.losses import OwnLoss
from tandem.algorithms.spec import resolve
from tandem.app.build import Parts, export_model, parts_of
from tandem.app.ledger import check_memory
from tandem.app.offline import is_offline
from tandem.app.own_progress import CHECKPOINTS, Progress, checkpointed, gone_on_with, restored
from tandem.app.preflight import prepare
from tandem.app.ranks import TrainEngine, ranks_of, train_engine
from tandem.app.roles import critic_of, judge_of, reference_of, score_of
from tandem.app.run import OWN_LOOP, begin_log, resume_log
from tandem.app.supervise import FAILED, FINISHED, INTERRUPTED, REASONS
from tandem.config.load import load
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError, TandemError
from tandem.core.events import EvaluationFinished, RunFinished, StepFinished, WeightsPublished
from tandem.core.protocols import EventSink
from tandem.core.types import BatchPlan, Floats, Group, Sample, StepResult, Task, Trajectory, WeightVersion
from tandem.engine.train.checkpoint import CheckpointStore
from tandem.engine.train.step import LocalTrainEngine
from tandem.record.log import EventLog
from tandem.record.sinks.nowhere import NowhereSink
from tandem.trainer.batcher import Batcher
from tandem.trainer.saving import Saver
from tandem.trainer.scoring import Judge, Score
from tandem.trainer.update import Critic, check_roles, update


class Rolled(NamedTuple):
    """A task's episodes, failed ones included, and the token streams of those that have a reward, by index."""

    group: Group
    trajectories: tuple[Trajectory, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """What there is between entering and leaving."""

    parts: Parts
    engine: TrainEngine
    batcher: Batcher
    reference: Score | None
    critic: Critic | None
    judge: Judge | None
    sink: EventSink
    saver: Saver | None


class Trainer:
    """The parts of a recipe under a loop of the user's own.

    ``recipe`` is a file or a ``Recipe``, ``options`` set its keys over it (``{"rollout.group_size": 4}``);
    ``folder`` keeps events and checkpoints there, to be read by ``tandem runs show``; None: nothing is kept. With
    ``resume`` the loop goes on from the newest checkpoint in ``folder``, or begins where there is none. ``step`` counts
    what ``train`` has done; the learning rate follows the recipe's schedule over ``trainer.steps``.
    """

    def __init__(
        self,
        recipe: Recipe | Path | str,
        *,
        options: Mapping[str, object] | None = None,
        folder: Path | str | None = None,
        resume: bool = False,
    ) -> None:
        self.recipe, self._origins = _resolved(recipe, options or {})
        if resume and folder is None:
            raise ConfigError("nothing can be resumed without a folder", hint="Trainer(..., folder=..., resume=True)")
        self._folder = None if folder is None else Path(folder)
        self._resume = resume
        self._progress = Progress()
        self._stack = AsyncExitStack()
        self._stepping = asyncio.Lock()
        self._open: _Open | None = None

    async def __aenter__(self) -> Trainer:
        """Check the recipe and load its model.

        Raises:
            TandemError: what is wrong with recipe, environment, model, machine, or the folder to go on with.
        """
        recipe = self.recipe
        if is_offline(recipe):
            raise ConfigError(f"{recipe.algorithm.name} learns from data: there is nothing to roll out",
                              hint="tandem train runs it; or choose a method that learns from episodes")  # fmt: skip
        ready = await asyncio.to_thread(prepare, recipe)
        check_memory(recipe, ready.model)
        async with AsyncExitStack() as stack:
            sink = self._sink(stack)
            parts = await stack.enter_async_context(parts_of(recipe, ready, sink))
            ranks = await stack.enter_async_context(ranks_of(recipe))
            algorithm = resolve(recipe.algorithm)
            engine = await train_engine(
                recipe, parts.weights, parts.compute, ranks, algorithm=algorithm, total_steps=recipe.trainer.steps
            )
            stack.push_async_callback(engine.close)
            model = reference_of(parts, algorithm)
            reference = score_of(parts, model)
            critic = critic_of(parts, algorithm)
            check_roles(algorithm, reference, critic)
            batcher = Batcher(algorithm, recipe.engine.train, staleness=recipe.rollout.staleness, sink=sink)
            saver = None
            if self._folder is not None:
                store = CheckpointStore(
                    self._folder / CHECKPOINTS, parts.weights, engine.optimizer, keep=recipe.trainer.keep_checkpoints,
                    reference=None if algorithm.teacher else model, critic=critic,
                )  # fmt: skip
                saver = Saver(store, sink)
                await restored(store, self._progress)
            self._open = _Open(
                parts=parts, engine=engine, batcher=batcher, reference=reference, critic=critic,
                judge=judge_of(parts), sink=sink, saver=saver,
            )  # fmt: skip
            self._stack = stack.pop_all()
        await parts.engine.load(self.version)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here = self._here
        code = FINISHED if kind is None else FAILED if issubclass(kind, Exception) else INTERRUPTED
        detail = str(error or "")
        try:
            if here.saver is not None:
                await here.saver.__aexit__(kind, error, trace)
        except TandemError as failure:
            code, detail = FAILED, str(failure)
            raise
        finally:
            try:
                here.sink.emit(RunFinished(step=self.step, reason=REASONS[code], detail=detail))
            finally:
                self._open = None
                await self._stack.aclose()

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self._progress.step

    @property
    def state(self) -> dict[str, object]:
        """What the loop keeps of its own between interruptions: plain values by name, part of every checkpoint."""
        return self._progress.own

    @property
    def version(self) -> WeightVersion:
        """The weights as they are now."""
        return WeightVersion(number=self._here.parts.weights.version, step=self.step)

    async def rollout(
        self,
        num_groups: int | None = None,
        *,
        tasks: Sequence[Task] | None = None,
        group_size: int | None = None,
        temperature: float | None = None,
    ) -> list[Rolled]:
        """``group_size`` episodes of each of ``tasks``, or of the environment's next ``num_groups`` ones (defaults: the
        recipe's), under the current weights. A failed episode is in its group, without a reward.

        Raises:
            EpisodeError: an episode cannot be told as tokens. PluginError: the environment gave no task.
        """
        parts, section, progress = self._here.parts, self.recipe.rollout, self._progress
        if tasks is None:
            first, count = progress.num_tasks, section.groups_per_step if num_groups is None else num_groups
            seed, environment = self.recipe.trainer.seed, parts.ready.environment
            tasks = [environment.task(seed, index) for index in range(first, first + count)]
            progress.num_tasks += count
        elif num_groups is not None:
            raise ConfigError("rollout takes num_groups or tasks, not both")
        progress.num_rollouts += 1
        heat = section.temperature if temperature is None else temperature
        groups = await parts.rollout.make(
            tasks,
            name=f"r{progress.num_rollouts}",
            version=self.version,
            temperature=heat,
            samples=group_size or section.group_size,
            purpose="train",
            seed_parts=("own", progress.num_rollouts),
            priority=section.priority,
        )
        records = [(group, parts.rollout.trajectories(group, temperature=heat)) for group in groups]
        if self._here.judge is not None:
            records = await self._here.judge.judge(records)
        return [Rolled(*record) for record in records]

    def credit(self, groups: Sequence[Rolled]) -> list[Sample]:
        """Samples with the advantages that the recipe's method gives; a group that it drops (all failed, stale, flat)
        makes none, and an event says so."""
        return list(self._here.batcher.admit(groups, version=self.version.number).samples)

    @staticmethod
    def sample(trajectory: Trajectory, advantage: float | Sequence[float]) -> Sample:
        """A sample whose credit is the user's own: one advantage, or one for every token of the trajectory."""
        return credited(trajectory, advantage)

    async def train(self, samples: Sequence[Sample], *, loss: OwnLoss | None = None) -> StepResult:
        """One step on all of ``samples`` (several updates where the method makes them), published when it returns.

        ``loss`` takes the place of the method's: a pure function of ``LossTokens`` that gives one loss a token. The
        method still says which streams there are (``algorithm.kl_weight`` above 0: ``reference_N``) and what share of
        the step each token has.

        Raises:
            ConfigError: there are no samples, or ``loss`` gives what no loss is.
            EngineError: the gradient is not finite; nothing has changed.
        """
        if not samples:
            raise ConfigError("no samples to train on", hint="credit() of groups that all failed or were flat is empty")
        async with self._stepping:
            return await self._train(samples, loss)

    async def _train(self, samples: Sequence[Sample], loss: OwnLoss | None) -> StepResult:
        here, started = self._here, time.perf_counter()
        batcher = here.batcher
        if loss is not None:
            algorithm = dataclasses.replace(batcher.algorithm, flat_learns=True)
            batcher = Batcher(
                algorithm, self.recipe.engine.train, staleness=self.recipe.rollout.staleness, sink=here.sink
            )
        if self.recipe.engine.train.hand_over:
            await here.parts.engine.sleep()
        result = await update(
            self.step + 1,
            samples,
            batcher,
            train=_with_loss(here.engine, loss),
            score=here.engine.score,
            reference=here.reference,
            critic=here.critic,
        )
        publishing = time.perf_counter()
        version = dataclasses.replace(await here.engine.publish(), step=self.step + 1)
        self._progress.step += 1
        await here.parts.load(version)
        self._tell(samples, result, version, started, publishing)
        return result

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Log-probability of every token under the current weights, one stream a trajectory; nothing predicts the
        first token, which gets 0."""
        return await self._here.engine.score(trajectories)

    async def evaluate(self, name: str = "") -> EvaluationFinished:
        """The current weights on the environment's held-out tasks; ``name`` is new in the run.

        Raises:
            ConfigError: there are no such tasks.
        """
        here = self._here
        self._progress.num_evaluations += 1
        outcome = await here.parts.evaluate(name or f"evaluation {self._progress.num_evaluations}", self.step)
        if outcome is None:
            raise ConfigError("nothing to evaluate on",
                              hint="give the environment eval_tasks, and set environment.num_eval_tasks")  # fmt: skip
        here.sink.emit(outcome)
        return outcome

    async def checkpoint(self) -> None:
        """Take a checkpoint of everything that the rest of the loop depends on, in the trainer's folder, when the step
        in hand is done: weights, optimizer, schedule, reference and critic, random state, place in the tasks, and
        ``state``. It is written while the loop goes on; leaving the trainer waits for it. The newest
        ``trainer.keep_checkpoints`` are kept.

        Raises:
            ConfigError: the trainer has no folder, or ``state`` holds what cannot be written.
            RecordError: the write before this one failed.
        """
        saver = self._here.saver
        if saver is None:
            raise ConfigError("this trainer has no folder for checkpoints", hint="Trainer(..., folder=...)")
        async with self._stepping:
            await checkpointed(saver, self._progress)

    async def save(self, folder: Path | str) -> Path:
        """Write the current weights as a Hugging Face folder ``model`` in ``folder`` (adapters merged, and alone as
        ``adapter``), which ``tandem serve`` takes; returns it.

        Raises:
            RecordError: the disk does not take it.
        """
        parts, target = self._here.parts, Path(folder)
        return await parts.compute.run(
            "train", lambda: export_model(parts.weights.model, target, base=parts.ready.model.path)
        )

    @property
    def _here(self) -> _Open:
        if self._open is None:
            raise TandemError("this trainer is not open", hint="use it inside of: async with Trainer(...) as trainer")
        return self._open

    def _sink(self, stack: AsyncExitStack) -> EventSink:
        if self._folder is None:
            return NowhereSink()
        goes_on = self._resume and gone_on_with(self._folder, self.recipe)
        if not self._resume and self._folder.exists() and any(self._folder.iterdir()):
            raise ConfigError(f"folder {self._folder} is not empty",
                              hint="give each run a folder of its own, or go on with it: resume=True")  # fmt: skip
        self._folder.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(EventLog(self._folder))
        if goes_on:
            resume_log(log)
        else:
            begin_log(log, self.recipe, self._origins, OWN_LOOP)
        return log

    def _tell(
        self, samples: Sequence[Sample], result: StepResult, version: WeightVersion, started: float, publishing: float
    ) -> None:
        """The events of a step."""
        now = time.perf_counter()
        rewards = {each.trajectory.episode_id: each.reward for each in samples if each.reward is not None}
        cause = self._here.sink.emit(
            StepFinished(
                step=self.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                num_groups=len({each.trajectory.group_id for each in samples}),
                num_samples=len(samples),
                num_loss_tokens=result.num_loss_tokens,
                num_tokens=result.num_tokens,
                mean_reward=sum(rewards.values()) / len(rewards) if rewards else None,
                metrics=result.metrics,
                rollout_s=0.0,
                train_s=result.train_s,
                total_s=now - started,
            )
        )
        self._here.sink.emit(
            WeightsPublished(
                version=version.number,
                step=self.step,
                digest=version.digest,
                place=version.place,
                publish_s=now - publishing,
            ),
            cause=cause,
        )


def _resolved(recipe: Recipe | Path | str, options: Mapping[str, object]) -> tuple[Recipe, dict[str, str]]:
    if isinstance(recipe, Recipe):
        if options:
            raise ConfigError("options go over a recipe file, not over a Recipe", hint="set them in the Recipe")
        return recipe, {}
    words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items()]
    return load([recipe], words)


def _with_loss(engine: TrainEngine, loss: OwnLoss | None) -> Callable[[BatchPlan], Awaitable[StepResult]]:
    if loss is None:
        return engine.step
    if not isinstance(engine, LocalTrainEngine):
        raise ConfigError("a loss of one's own trains in one process: other ranks have no such function",
                          hint="trainer.devices = 1, or register a method whose loss is module:attribute")  # fmt: skip
    return lambda plan: engine.step(plan, loss=loss)
