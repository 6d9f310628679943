"""Models with one number a token instead of a vocabulary: critics and reward models.

Owns: the value head, the critic's passes and update, the reward model's score of a whole answer.
Refuses: the policy; deciding what is trained. Invariants: a critic's value of token t is read from the hidden row of
token t - 1, what the policy knew when it chose; a reward model scores the last token; the loss has the same one
normaliser as the policy's, whatever the micro-batching.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tandem.algorithms.pairs import bradley_terry
from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import ConfigError
from tandem.core.types import BatchPlan, Floats, Ids, Sample, StepResult, Trajectory
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.batch import Layout, lay_out
from tandem.engine.train.optimizer import AdamW
from tandem.engine.train.schedule import learning_rate
from tandem.engine.train.score import Parking, within_budget
from tandem.models.attention import AttentionContext
from tandem.models.causal_lm import CausalLM


class ValueModel(nn.Module):
    """A decoder without its vocabulary head, and a float32 head with one output, which starts at 0."""

    def __init__(self, body: CausalLM) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.spec.hidden_size, 1, bias=False, device=body.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        if not body.spec.tied_head:
            body.head_weight.requires_grad_(False)  # it is never read

    def forward(self, layout: Layout, *, checkpoint: bool = False) -> Tensor:
        """Float32 values of all packed rows, ``[T]``."""
        context = AttentionContext(keys=layout.keys, write_slots_T=None, cache=None)
        hidden_TD = self.body(layout.ids_T, layout.positions_T, context, checkpoint=checkpoint)
        return self.head(hidden_TD.float())[:, 0]


def value_losses(values_N: Tensor, returns_N: Tensor, old_N: Tensor, clip: float | None) -> Tensor:
    """Half the squared error, or the worse of it and that of the value clipped to ``clip`` around the old one, as
    PPO's reference implementation has it."""
    plain_N = 0.5 * (values_N - returns_N).square()
    if clip is None:
        return plain_N
    held_N = old_N + (values_N - old_N).clamp(-clip, clip)
    return torch.maximum(plain_N, 0.5 * (held_N - returns_N).square())


class CriticEngine:
    """A value model of its own, beside the policy, in jobs of the train lane. ``optimizer`` is what a checkpoint
    stores of it."""

    def __init__(
        self,
        model: ValueModel,
        compute: ComputeQueue,
        *,
        train: TrainSection,
        optimizer: OptimizerSection,
        clip: float | None,
        total_steps: int,
    ) -> None:
        self.model = model
        self.optimizer = AdamW(model, optimizer)
        self._compute = compute
        self._train = train
        self._schedule = optimizer
        self._clip = clip
        self._total_steps = total_steps

    async def values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """The value of what comes before every token, one stream a trajectory; the first token has none: 0."""
        streams: list[Floats] = []
        for batch in within_budget(trajectories, self._train.micro_batch_tokens):
            streams += await self._compute.run("train", lambda batch=batch: self._values(batch))
        return streams

    async def step(self, plan: BatchPlan) -> dict[str, float]:
        """One update towards the returns, the mean over the loss tokens of the plan; returns metrics."""
        await self._compute.run("train", self.optimizer.discard)
        losses = [await self._compute.run("train", lambda row=row: self._micro_batch(row, plan)) for row in plan.rows]
        rate = learning_rate(self._schedule, step=plan.step, total_steps=self._total_steps)
        norm = await self._compute.run("train", lambda: self.optimizer.step(rate))
        return {"value_loss": sum(losses), "value_grad_norm": norm}

    @torch.no_grad()
    def _values(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        layout = self._lay_out([trajectory.token_ids[:-1] for trajectory in trajectories])
        values = self.model(layout).cpu().numpy()
        return [
            array("f", np.concatenate([np.zeros(1, np.float32), values[slots]]).tobytes()) for slots in layout.slots
        ]

    def _micro_batch(self, row: Sequence[Sample], plan: BatchPlan) -> float:
        layout = self._lay_out([sample.trajectory.token_ids[:-1] for sample in row])
        rows, returns, old = [], [], []
        for sample, slots in zip(row, layout.slots, strict=True):
            if sample.returns is None or sample.values is None:
                raise ValueError(f"the sample of {sample.trajectory.episode_id} carries no returns for the critic")
            tokens = np.flatnonzero(np.frombuffer(sample.rl_weights, dtype=np.float32))
            rows.append(slots[tokens - 1])
            returns.append(np.frombuffer(sample.returns, dtype=np.float32)[tokens])
            old.append(np.frombuffer(sample.values, dtype=np.float32)[tokens])
        device = self.model.body.device
        rows_N, returns_N, old_N = (torch.from_numpy(np.concatenate(each)).to(device) for each in (rows, returns, old))
        values_T = self.model(layout, checkpoint=self._train.checkpoint_activations)
        losses_N = value_losses(values_T[rows_N.long()], returns_N, old_N, self._clip)
        loss = losses_N.sum() / plan.num_loss_tokens
        loss.backward()
        self.optimizer.accumulate()
        return float(loss.detach())

    def _lay_out(self, streams: Sequence[Ids]) -> Layout:
        return lay_out(streams, share_prefixes=self._train.share_prefixes, device=self.model.body.device)


class AnswerScorer:
    """A reward model's score of whole trajectories, read off their last tokens."""

    def __init__(
        self, model: ValueModel, compute: ComputeQueue, train: TrainSection, parking: Parking | None = None
    ) -> None:
        self.model = model
        self._parking = parking or Parking(model, parks=False)
        self._compute = compute
        self._train = train

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """One a trajectory, in jobs of the train lane."""
        scores: list[float] = []
        async with self._parking.used(self._compute):
            for batch in within_budget(trajectories, self._train.micro_batch_tokens):
                scores += await self._compute.run("train", lambda batch=batch: self._scores(batch).tolist())
        return scores

    @torch.no_grad()
    def _scores(self, trajectories: Sequence[Trajectory]) -> Tensor:
        return self.of_last([trajectory.token_ids for trajectory in trajectories])

    def of_last(self, streams: Sequence[Ids]) -> Tensor:
        """Float32 ``[streams]``, with their graph."""
        device = self.model.body.device
        layout = lay_out(streams, share_prefixes=self._train.share_prefixes, device=device)
        last_B = torch.tensor([int(slots[-1]) for slots in layout.slots], device=device)
        return self.model(layout, checkpoint=self._train.checkpoint_activations)[last_B]


class RewardModelEngine(AnswerScorer):
    """Trains a reward model on pairs: the Bradley-Terry loss of the scores of their last learned tokens."""

    def __init__(
        self,
        model: ValueModel,
        compute: ComputeQueue,
        *,
        train: TrainSection,
        optimizer: OptimizerSection,
        algorithm: AlgorithmSpec,
        total_steps: int,
    ) -> None:
        """Raises:
        ConfigError: ``train`` weighs the balance of experts, which this loss does not.
        """
        if train.balance_weight:
            raise ConfigError(
                f"engine.train.balance_weight = {train.balance_weight}: a reward model's loss has no such part",
                hint="set engine.train.balance_weight = 0",
            )
        super().__init__(model, compute, train)
        self.optimizer = AdamW(model, optimizer)
        self._schedule = optimizer
        self._algorithm = algorithm
        self._total_steps = total_steps

    async def step(self, plan: BatchPlan) -> StepResult:
        """Forward, loss, backward, update for one plan of pairs."""
        started = time.perf_counter()
        await self._compute.run("train", self.optimizer.discard)
        parts = [await self._compute.run("train", lambda row=row: self._micro_batch(row, plan)) for row in plan.rows]
        rate = learning_rate(self._schedule, step=plan.step, total_steps=self._total_steps)
        norm = await self._compute.run("train", lambda: self.optimizer.step(rate))
        loss, right, margin = (sum(part[index] for part in parts) for index in range(3))
        pairs = plan.num_sequences / 2
        return StepResult(
            step=plan.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            num_loss_tokens=plan.num_loss_tokens,
            num_tokens=sum(len(sample.trajectory.token_ids) for row in plan.rows for sample in row),
            metrics={"pair_accuracy": right / pairs, "pair_margin": margin / pairs},
            train_s=time.perf_counter() - started,
        )

    def _micro_batch(self, row: Sequence[Sample], plan: BatchPlan) -> tuple[float, float, float]:
        scores_B = self.of_last([sample.trajectory.token_ids for sample in row])
        loss_P, margin_P = bradley_terry(scores_B, self._algorithm.label_smoothing)
        loss = loss_P.sum() * 2 / plan.num_sequences
        loss.backward()
        self.optimizer.accumulate()
        return float(loss.detach()), float((margin_P > 0).sum()), float(margin_P.detach().sum())
