"""The train engine over several ranks: one plan, one optimizer step, every device of the machine.

Owns: which rows each rank computes, and the same order of exchanges on all. The serving weights are rank 0's whole
model: the trained shards are gathered into it at the end of every step, in one compute job with the version's bump.
Refuses: processes (``ranks``), sharding (``parallel``). Invariants: those of ``step``; the gradient is that of one
rank but for the order of sums, and the same plan on the same number of ranks gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tandem.algorithms.spec import Data
from tandem.core.types import BatchPlan, Floats, Sample, StepResult, Trajectory, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.parallel import Setup, Shard
from tandem.engine.train.rank_messages import Answer, Build, Command, Gather, Learn, Restore, Score
from tandem.engine.train.ranks import RankGroup
from tandem.engine.train.schedule import learning_rate
from tandem.engine.train.score import within_budget
from tandem.engine.train.step import normaliser, result_of
from tandem.engine.weights import PublishedWeights

T = TypeVar("T")
Row = tuple[Sample, ...]


class RankedTrainEngine:
    """Trains shards of the published weights on all ranks; make it with ``open``. ``optimizer`` is what a checkpoint
    stores."""

    def __init__(
        self, shard: Shard, weights: PublishedWeights, compute: ComputeQueue, ranks: RankGroup, setup: Setup, steps: int
    ) -> None:
        self.optimizer = _WholeOptimizer(shard, weights, ranks)
        self._shard = shard
        self._weights = weights
        self._compute = compute
        self._ranks = ranks
        self._setup = setup
        self._total_steps = steps
        self._unpublished = False

    @classmethod
    async def open(
        cls, weights: PublishedWeights, compute: ComputeQueue, ranks: RankGroup, *, setup: Setup, total_steps: int
    ) -> RankedTrainEngine:
        """Build the shards and fill them with the published weights.

        Raises:
            ClusterError: a rank was lost. EngineError: this PyTorch cannot shard here.
        """
        whole = dict(weights.model.named_parameters())

        def build() -> Shard:
            shard = Shard(setup, ranks.device)
            shard.fill(whole)
            return shard

        answers = ranks.ask([Build(setup=setup)] * (ranks.num_ranks - 1))
        shard, _ = await ranks.together("the ranks could not take the model", compute.run("train", build), answers)
        return cls(shard, weights, compute, ranks, setup, total_steps)

    async def step(self, plan: BatchPlan) -> StepResult:
        """Forward, loss, backward, update for one plan; the weights have their next version when it returns.

        Raises:
            ClusterError: a rank was lost; no rank goes on. EngineError: the gradient is not finite, nothing changed.
        """
        started = time.perf_counter()
        rate = learning_rate(self._setup.optimizer, step=plan.step, total_steps=self._total_steps)
        step = normaliser(plan, self._weights.version)
        unit = 2 if self._setup.algorithm.data is Data.PREFERENCES else 1
        dealt = deal(plan.rows, self._ranks.num_ranks, unit=unit)
        learns: list[Command] = [Learn(step=step, rows=tuple(rows), rate=rate) for rows in dealt[1:]]

        async def own() -> tuple[float, dict[int, Tensor]]:
            await self._run(self._shard.optimizer.discard)
            measured: dict[int, Tensor] = {}
            for place, row in dealt[0]:
                values = await self._run(lambda row=row: self._shard.learn(row, step))
                if values is not None:
                    measured[place] = values
            return await self._run(lambda: self._finish(plan, rate)), measured

        (norm, measured), answers = await self._together(f"step {plan.step}", learns, own)
        for answer in answers:
            for place, values in answer.measured:
                measured[place] = torch.tensor(values, dtype=torch.float64, device=self._ranks.device)
        in_order = [measured[place] for place in sorted(measured)]
        return result_of(plan, in_order, norm=norm, rate=rate, started=started)

    def _finish(self, plan: BatchPlan, rate: float) -> float:
        norm = self._shard.update(rate)
        self._shard.publish(self._weights.model)
        self._weights.bump(plan.step)
        self._unpublished = True
        return norm

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Log-probability of every token under the current weights, one stream a trajectory."""
        batches = within_budget(trajectories, self._setup.train.micro_batch_tokens)
        num_ranks = self._ranks.num_ranks
        batches += [[]] * (-len(batches) % num_ranks)
        scores: list[Command] = [
            Score(batches=tuple(tuple(batch) for batch in batches[rank::num_ranks])) for rank in range(1, num_ranks)
        ]

        async def own() -> list[list[Floats]]:
            made = [await self._run(lambda batch=batch: self._shard.score(batch)) for batch in batches[::num_ranks]]
            await self._run(self._shard.settle)
            return made

        mine, answers = await self._together("scoring", scores, own)
        parts = [mine, *(answer.scores for answer in answers)]
        return [stream for number in range(len(batches)) for stream in parts[number % num_ranks][number // num_ranks]]

    async def publish(self) -> WeightVersion:
        """The version that the last step made; without a step since the last call, the same weights get the next
        number."""
        if not self._unpublished:
            await self._run(lambda: self._weights.bump(self._weights.current.step))
        self._unpublished = False
        return await self._run(self._weights.named)

    async def close(self) -> None:
        """Forget gradients; weights, queue and ranks belong to others."""
        await self._run(self._shard.optimizer.discard)

    async def _run(self, job: Callable[[], T]) -> T:
        return await self._compute.run("train", job)

    async def _together(
        self, what: str, commands: Sequence[Command], own: Callable[[], Awaitable[T]]
    ) -> tuple[T, list[Answer]]:
        answers = self._ranks.ask(commands)
        return await self._ranks.together(what, own(), answers)


def deal(rows: Sequence[Row], num_ranks: int, *, unit: int = 1) -> list[list[tuple[int, Row]]]:
    """Give each rank as many rows as any other, numbered in the order of the plan: rows of like size at the same time,
    for the ranks wait for each other at every layer. The longest rows are cut in two, between units of ``unit``
    samples, until their number comes out; where nothing can be cut a rank gets empty rows."""
    pieces = list(rows)
    while len(pieces) % num_ranks:
        longest = max((row for row in pieces if len(row) > unit), key=_num_tokens, default=None)
        if longest is None:
            break
        place = next(index for index, row in enumerate(pieces) if row is longest)
        pieces[place : place + 1] = _halves(longest, unit)
    order = sorted(range(len(pieces)), key=lambda place: (-_num_tokens(pieces[place]), place))
    dealt: list[list[tuple[int, Row]]] = [[] for _ in range(num_ranks)]
    for turn, place in enumerate(order):
        dealt[turn % num_ranks].append((place, pieces[place]))
    for own in dealt:
        own += [(-1, ())] * (len(dealt[0]) - len(own))
    return dealt


def _num_tokens(row: Row) -> int:
    return sum(len(sample.trajectory.token_ids) for sample in row)


def _halves(row: Row, unit: int) -> tuple[Row, Row]:
    """The row in two parts of about as many tokens."""
    cuts = range(unit, len(row), unit)
    cut = min(cuts, key=lambda place: abs(_num_tokens(row[:place]) - _num_tokens(row[place:])))
    return row[:cut], row[cut:]


class _WholeOptimizer:
    """The state of all ranks' optimizers as that of one, for checkpoints: they are the same files for every number of
    ranks. Rank 0 holds it all at once, on the CPU, while it is written: twelve bytes a trained parameter."""

    def __init__(self, shard: Shard, weights: PublishedWeights, ranks: RankGroup) -> None:
        self._shard = shard
        self._weights = weights
        self._ranks = ranks

    def weights(self) -> dict[str, Tensor]:
        """The float32 masters by parameter name."""
        return self._exchange("gathering the weights", Gather(moments=False), self._shard.optimizer.weights)

    def moments(self) -> dict[str, Tensor]:
        """Both moments and the update count by parameter name; empty before the first update."""
        return self._exchange("gathering the optimizer", Gather(moments=True), self._shard.optimizer.moments)

    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Take over, on all ranks, what ``weights`` and ``moments`` gave, and publish it.

        Raises:
            RecordError: names or shapes are not those of this model.
        """
        self._shard.optimizer.check(weights, moments)

        def own() -> None:
            self._shard.restore(weights, moments, with_moments=bool(moments))

        self._exchange("restoring", Restore(moments=bool(moments)), own)
        places = dict(self._weights.model.named_parameters())
        with torch.no_grad():
            for name, master in weights.items():
                places[name].copy_(master)

    def before_change(self, call: Callable[[], object]) -> None:
        """What this gives are copies of its own: they never change."""

    def _exchange(self, what: str, command: Command, own: Callable[[], T]) -> T:
        answers = self._ranks.ask([command] * (self._ranks.num_ranks - 1))
        try:
            result = own()
        except (RuntimeError, ValueError) as error:  # the library's, when a partner is gone
            raise self._ranks.fail(what, error) from error
        self._ranks.wait(what, answers)
        return result
