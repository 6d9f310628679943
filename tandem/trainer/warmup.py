"""Supervised steps on demonstrations, before reinforcement and never counted as it.

Invariant: which demonstrations make which batch is a function of the seed alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.warmup import WarmupSection
from tandem.core.errors import ConfigError
from tandem.core.events import StepFinished, WeightsPublished
from tandem.core.protocols import EventSink, TrainEngine
from tandem.core.types import Sample, WeightVersion
from tandem.core.wire import derive_seed
from tandem.trainer.batcher import length_metrics, make_plan


def batches(samples: Sequence[Sample], *, batch_size: int, steps: int, seed: int) -> Iterator[list[Sample]]:
    """``steps`` batches in shuffled order; when all samples were seen they are shuffled anew."""
    if not samples:
        raise ConfigError(
            "warmup.steps is set, but the environment gives no demonstrations", hint="set warmup.steps = 0"
        )
    order: list[int] = []
    epoch = 0
    for _ in range(steps):
        while len(order) < batch_size:
            following = list(range(len(samples)))
            random.Random(derive_seed(seed, "warmup", epoch)).shuffle(following)
            order += following
            epoch += 1
        yield [samples[index] for index in order[:batch_size]]
        order = order[batch_size:]


async def warm_up(
    engine: TrainEngine,
    samples: Sequence[Sample],
    algorithm: AlgorithmSpec,
    *,
    section: WarmupSection,
    train: TrainSection,
    seed: int,
    sink: EventSink,
    on_version: Callable[[WeightVersion], Awaitable[None]],
) -> None:
    """Run the section's steps; ``engine`` was made for them (its own optimizer, rate and last step)."""
    chosen = batches(samples, batch_size=section.batch_size, steps=section.steps, seed=seed)
    for step, batch in enumerate(chosen, start=1):
        started = time.perf_counter()
        result = await engine.step(make_plan(step, batch, algorithm, train))
        version = await engine.publish()
        await on_version(version)
        cause = sink.emit(
            StepFinished(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                num_groups=0,
                num_samples=len(batch),
                num_loss_tokens=result.num_loss_tokens,
                num_tokens=result.num_tokens,
                mean_reward=None,
                metrics=result.metrics | length_metrics(batch),
                rollout_s=0.0,
                train_s=result.train_s,
                total_s=time.perf_counter() - started,
                phase="warmup",
            )
        )
        sink.emit(
            WeightsPublished(version=version.number, step=0, digest=version.digest, place=version.place, publish_s=0.0),
            cause=cause,
        )
