"""Training on data: steps over demonstrations or pairs, in an order that the seed alone decides.

Owns: which rows make which step, saving, evaluating. Refuses: files, tensors. Invariant: the rows of a step are a
function of the seed and the step, so a resumed run goes on as if it had not been interrupted.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.data import DataSection
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.trainer import TrainerSection
from tandem.core.events import StepFinished
from tandem.core.protocols import EventSink, WeightStore
from tandem.core.types import BatchPlan, Sample, StepResult
from tandem.core.wire import derive_seed
from tandem.trainer.batcher import length_metrics, make_plan
from tandem.trainer.saving import Saver
from tandem.trainer.scoring import Score, with_reference

Unit = tuple[Sample, ...]  # one demonstration, or the better and the worse answer


class StepEngine(Protocol):
    """What makes a step of a plan."""

    async def step(self, plan: BatchPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRun:
    """The run and what it is joined to. ``evaluate`` measures the present weights, under metric names;
    ``reference`` scores under the weights that the run began with."""

    engine: StepEngine
    algorithm: AlgorithmSpec
    train: TrainSection
    trainer: TrainerSection
    data: DataSection
    sink: EventSink
    store: WeightStore
    evaluate: Callable[[], Awaitable[dict[str, float]]]
    reference: Score | None = None

    async def run(self, units: Sequence[Unit], *, after: int = 0) -> None:
        """Steps ``after + 1`` to the last one; their checkpoints are on the disk when it returns.

        Raises:
            RecordError: a checkpoint could not be written.
        """
        chosen = batches(
            units, batch_size=self.data.batch_size, seed=self.trainer.seed, shuffle=self.data.shuffle
        )
        async with Saver(self.store, self.sink) as saver:
            for step, batch in enumerate(itertools.islice(chosen, self.trainer.steps), start=1):
                if step > after:
                    await self._step(step, batch, saver)
                    await saver.check()

    async def _step(self, step: int, batch: Sequence[Unit], saver: Saver) -> None:
        started = time.perf_counter()
        samples = list(itertools.chain.from_iterable(batch))
        if self.reference is not None:
            samples = await with_reference(samples, self.reference)
        result = await self.engine.step(make_plan(step, samples, self.algorithm, self.train))
        last = step == self.trainer.steps
        metrics = result.metrics | length_metrics(samples)
        if last or (self.trainer.eval_every and step % self.trainer.eval_every == 0):
            metrics |= await self.evaluate()
        cause = self.sink.emit(
            StepFinished(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                num_groups=0,
                num_samples=len(samples),
                num_loss_tokens=result.num_loss_tokens,
                num_tokens=result.num_tokens,
                mean_reward=None,
                metrics=metrics,
                rollout_s=0.0,
                train_s=result.train_s,
                total_s=time.perf_counter() - started,
            )
        )
        if last or (self.trainer.checkpoint_every and step % self.trainer.checkpoint_every == 0):
            await saver.begin(step, {}, cause)


def batches(units: Sequence[Unit], *, batch_size: int, seed: int, shuffle: bool) -> Iterator[list[Unit]]:
    """Batches without end; a batch may reach over the end of a pass over the data into the next."""
    if not units:
        raise ValueError("no data to make batches of")
    order: list[int] = []
    for epoch in itertools.count():
        following = list(range(len(units)))
        if shuffle:
            random.Random(derive_seed(seed, "data", epoch)).shuffle(following)
        order += following
        while len(order) >= batch_size:
            yield [units[index] for index in order[:batch_size]]
            order = order[batch_size:]
