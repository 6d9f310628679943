"""One step's updates: samples get the streams that their method needs, then every plan of theirs is trained on.

Owns: the order (reference, old weights, values, credit, then the updates with the critic's beside them).
Refuses: choosing samples; publishing. Invariant: the training loop and a loop of the user's own come through here, so
a step means the same in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tandem.algorithms.credit import settle
from tandem.algorithms.spec import AlgorithmSpec
from tandem.core.errors import EngineError
from tandem.core.types import BatchPlan, Floats, Sample, StepResult, Trajectory
from tandem.trainer.batcher import Batcher
from tandem.trainer.scoring import Score, with_old, with_reference, with_values


class Critic(Protocol):
    """A value model that is trained beside the policy."""

    async def values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """The value of what comes before every token."""
        ...

    async def step(self, plan: BatchPlan) -> dict[str, float]:
        """One update towards the returns of the plan's samples; returns metrics."""
        ...


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


def check_roles(algorithm: AlgorithmSpec, reference: Score | None, critic: Critic | None) -> None:
    """Raises:
        EngineError: the method needs a model that is not there.
    """
    if algorithm.needs_reference and reference is None:
        raise EngineError(f"{algorithm.name} with a KL penalty needs reference weights, but got none")
    if algorithm.critic and critic is None:
        raise EngineError(f"{algorithm.name} needs a critic, but got none")


async def update(
    step: int,
    samples: Sequence[Sample],
    batcher: Batcher,
    *,
    train: Callable[[BatchPlan], Awaitable[StepResult]],
    score: Score,
    reference: Score | None = None,
    critic: Critic | None = None,
) -> StepResult:
    """Every update that the batcher's method makes on ``samples``, which are not empty; ``train`` does one, ``score``
    gives log-probabilities under the weights in training."""
    algorithm, samples = batcher.algorithm, list(samples)
    if algorithm.needs_reference and reference is not None:
        samples = await with_reference(samples, reference)
    if algorithm.needs_old:
        samples = await with_old(samples, score)
    if critic is not None:
        samples = await with_values(samples, critic.values)
    samples = settle(algorithm, samples)
    results = []
    for plan in batcher.plans(step, samples):
        result = await train(plan)
        if critic is not None:
            result = dataclasses.replace(result, metrics=result.metrics | await critic.step(plan))
        results.append(result)
    return merge_results(results)
