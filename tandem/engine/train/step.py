"""The train engine: one plan, one optimizer step.

Owns: forward, loss, backward of every micro-batch, each a job of the train lane (inference steps go between
them), and the last job: clip, update and version bump as one.
Refuses: deciding what is trained, or when. Invariants: the same plan on the same weights gives the same bits;
a step that fails or is cancelled before its last job leaves weights, optimizer and version as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from tandem.algorithms.losses import OwnLoss
from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import BatchPlan, Floats, Sample, StepResult, Trajectory, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.learner import Learner, Normaliser
from tandem.engine.train.optimizer import AdamW
from tandem.engine.train.schedule import learning_rate
from tandem.engine.train.score import Scorer
from tandem.engine.train.statistics import conclude
from tandem.engine.weights import PublishedWeights


class LocalTrainEngine:
    """Trains the published weights in place. ``optimizer`` is what a checkpoint stores."""

    def __init__(
        self,
        weights: PublishedWeights,
        compute: ComputeQueue,
        *,
        train: TrainSection,
        optimizer: OptimizerSection,
        algorithm: AlgorithmSpec,
        total_steps: int,
    ) -> None:
        self.optimizer = AdamW(weights.model, optimizer)
        self._weights = weights
        self._compute = compute
        self._schedule = optimizer
        self._learner = Learner(weights.model, train=train, algorithm=algorithm)
        self._total_steps = total_steps
        self._unpublished = False
        self._scorer = Scorer(weights.model, compute, train, replays=True)

    async def step(self, plan: BatchPlan, *, loss: OwnLoss | None = None) -> StepResult:
        """Forward, loss, backward, update for one plan; the weights have their next version when it returns. ``loss``
        takes the place of the method's."""
        started = time.perf_counter()
        rate = learning_rate(self._schedule, step=plan.step, total_steps=self._total_steps)
        # A step that was cancelled half-way may have left gradients.
        await self._compute.run("train", self.optimizer.discard)
        measured = []
        for row in plan.rows:
            measured.append(await self._compute.run("train", lambda row=row: self._micro_batch(row, plan, loss)))

        def finish() -> StepResult:
            norm = self.optimizer.step(rate)
            self._weights.bump(plan.step)
            self._unpublished = True
            return result_of(plan, measured, norm=norm, rate=rate, started=started)

        return await self._compute.run("train", finish)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Log-probability of every token under the current weights, one stream a trajectory."""
        return await self._scorer.score(trajectories)

    async def publish(self) -> WeightVersion:
        """The version that the last step made; the sampler has had it since then, for it reads the same tensors.
        Without a step since the last call, the same weights get the next number."""
        if not self._unpublished:
            await self._compute.run("train", lambda: self._weights.bump(self._weights.current.step))
        self._unpublished = False
        return await self._compute.run("train", self._weights.named)

    async def close(self) -> None:
        """Forget gradients; weights and queue belong to others."""
        await self._compute.run("train", self.optimizer.discard)

    def _micro_batch(self, row: Sequence[Sample], plan: BatchPlan, loss: OwnLoss | None) -> Tensor:
        measured = self._learner.micro_batch(row, normaliser(plan, self._weights.version), loss)
        self.optimizer.accumulate()
        return measured


def normaliser(plan: BatchPlan, version: int) -> Normaliser:
    """What the micro-batches of a plan divide by."""
    return Normaliser(num_loss_tokens=plan.num_loss_tokens, num_sequences=plan.num_sequences, version=version)


def result_of(
    plan: BatchPlan, measured: Sequence[Tensor], *, norm: float, rate: float, started: float
) -> StepResult:
    """The record of a finished step, from what its micro-batches measured; ``started`` by ``time.perf_counter``."""
    loss, num_computed, metrics = conclude(measured)
    return StepResult(
        step=plan.step,
        loss=loss,
        grad_norm=norm,
        learning_rate=rate,
        num_loss_tokens=plan.num_loss_tokens,
        num_tokens=sum(len(sample.trajectory.token_ids) for row in plan.rows for sample in row),
        metrics=metrics | {"computed_tokens": float(num_computed)},
        train_s=time.perf_counter() - started,
    )
