"""Several ranks, real processes: the numbers of one (W3), its scores, its checkpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bare_methods import GRPO
from hypothesis import given
from hypothesis import strategies as st

from tandem.algorithms.catalog.grpo import DAPO, GSPO
from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError, RecordError
from tandem.core.types import BatchPlan, floats
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.checkpoint import CheckpointStore
from tandem.engine.train.parallel import Setup
from tandem.engine.train.ranked import RankedTrainEngine, deal
from tandem.engine.train.ranks import RankGroup
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.lora import LoraSpec, adapters_of, add_adapters
from tandem.models.spec import ExpertSpec
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import SPEC, group_samples, sample

STILL = OptimizerSection(learning_rate=0.0, warmup_steps=0, beta1=0.0, max_grad_norm=0.0)
MOVING = OptimizerSection(learning_rate=1e-2, warmup_steps=3, decay="cosine")
SECTION = TrainSection(micro_batch_tokens=64)
LORA = LoraSpec(rank=4, alpha=8.0)
MIXTURE = dataclasses.replace(
    SPEC, family="qwen3_moe", qk_norm=True,
    experts=ExpertSpec(num_experts=6, per_token=2, intermediate_size=16, normalised=True),
)  # fmt: skip
KINDS = ["dense", "lora", "mixture"]


def build(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Weights of the seed; under adapters the same base always, which no checkpoint holds."""
    base = 0 if kind == "lora" else seed
    model = init_model(MIXTURE if kind == "mixture" else SPEC, seed=base, dtype=dtype, numerics="exact")
    if kind == "lora":
        add_adapters(model, LORA, seed=seed)
        with torch.no_grad():
            for adapter in adapters_of(model).values():
                adapter.b.normal_(std=0.05, generator=torch.Generator().manual_seed(seed))
    return model


def started(num_ranks: int) -> Iterator[RankGroup]:
    group = RankGroup(num_ranks, timeout_s=60)
    try:
        group.start()
        yield group
    finally:
        group.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    yield from started(2)


class Process:
    """Everything of one training run, on the ranks of a group or alone."""

    def __init__(
        self, ranks: RankGroup | None, kind: str = "dense", *, folder: Path | None = None, seed: int = 0,
        algorithm: AlgorithmSpec = GRPO, optimizer: OptimizerSection = MOVING, section: TrainSection = SECTION,
        dtype: torch.dtype = torch.float32, keep: int = 3,
    ) -> None:  # fmt: skip
        self.weights = PublishedWeights(build(kind, seed=seed, dtype=dtype))
        self.algorithm, self.section = algorithm, section
        self.compute = ComputeQueue()
        if ranks is None:
            self.engine = LocalTrainEngine(
                self.weights, self.compute, train=section, optimizer=optimizer, algorithm=algorithm, total_steps=8
            )
        else:
            setup = Setup(
                spec=self.weights.model.spec, lora=LORA if kind == "lora" else None, dtype=dtype, numerics="exact",
                train=section, optimizer=optimizer, algorithm=algorithm,
            )  # fmt: skip
            self.engine = asyncio.run(
                RankedTrainEngine.open(self.weights, self.compute, ranks, setup=setup, total_steps=8)
            )
        if folder is not None:
            self.store = CheckpointStore(folder, self.weights, self.engine.optimizer, keep=keep)

    def train(self, first: int, last: int, after: Callable[[int], object] = lambda step: None) -> None:
        async def go() -> None:
            for step in range(first, last + 1):
                await self.step(make_plan(step, group_samples(seed=step), self.algorithm, self.section))
                after(step)

        asyncio.run(go())

    async def step(self, plan: BatchPlan):
        result = await self.engine.step(plan)
        await self.engine.publish()
        return result

    def gradient(self) -> dict[str, torch.Tensor]:
        moments = self.engine.optimizer.moments()
        return {k.removeprefix("exp_avg."): v.clone() for k, v in moments.items() if k.startswith("exp_avg.")}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference over the largest entry, which must not be 0."""
    assert one.keys() == other.keys()
    largest = max(float(value.detach().abs().max()) for value in one.values())
    assert largest > 0
    return max(float((value - other[name]).detach().abs().max()) for name, value in one.items()) / largest


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_two_ranks_is_that_of_one(pair, kind) -> None:
    samples = group_samples(num_groups=3)
    for algorithm, tokens in ((GRPO, 16), (GSPO, 64), (DAPO, 4096)):
        section = TrainSection(micro_batch_tokens=tokens, checkpoint_activations=tokens == 64)
        process = Process(pair, kind, algorithm=algorithm, optimizer=STILL, section=section)
        result = asyncio.run(process.step(make_plan(1, samples, algorithm, section)))
        alone = Process(None, kind, algorithm=algorithm, optimizer=STILL, section=section)
        wanted = asyncio.run(alone.step(make_plan(1, samples, algorithm, section)))
        assert apart(alone.gradient(), process.gradient()) < 1e-6
        assert result.loss == pytest.approx(wanted.loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert result.num_loss_tokens == wanted.num_loss_tokens and result.num_tokens == wanted.num_tokens
        for name in wanted.metrics.keys() - {"computed_tokens"}:
            assert result.metrics[name] == pytest.approx(wanted.metrics[name], abs=1e-5), name


def test_w3_on_two_and_four_ranks_some_of_them_empty(pair) -> None:
    """2 tokens at loss 1 and 6 tokens at loss 3: a token mean of 2.5 however they are spread."""
    uniform = -math.log(SPEC.vocab_size)
    first = sample([1] * 3, [0, 1, 1], advantage=-1.0, logprob=uniform)
    second = sample([2] * 7, [0] + [1] * 6, advantage=-3.0, logprob=uniform)

    def losses(ranks: RankGroup) -> Iterator[float]:
        process = Process(ranks, algorithm=DAPO, optimizer=STILL)
        for parameter in process.weights.model.parameters():
            parameter.detach().zero_()  # uniform: log-probability -ln V everywhere
        process.engine.optimizer.restore(dict(process.weights.model.named_parameters()), {})
        for rows in (((first, second),), ((first,), (second,))):
            plan = BatchPlan(step=1, rows=rows, num_loss_tokens=8, num_sequences=2)
            yield asyncio.run(process.step(plan)).loss

    assert list(losses(pair)) == [pytest.approx(2.5, abs=1e-6)] * 2
    assert [len(row) for ((_, row),) in deal(((first, second),), 4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_resumes_bit_for_bit_and_moves_to_one(pair, kind, tmp_path) -> None:
    whole = Process(pair, kind)
    whole.train(1, 5)
    first = Process(pair, kind, folder=tmp_path / "a")
    first.train(1, 4, lambda step: first.store.save(step, {"step": step}))
    (tmp_path / "a").rename(tmp_path / "b")
    for step in (2, 3, 4):  # any of the last three
        again = Process(pair, kind, folder=tmp_path / "b", seed=9)
        assert again.store.restore(step) == {"step": step}
        again.train(step + 1, 5)
        assert again.weights.digest() == whole.weights.digest()
    alone = Process(None, kind, folder=tmp_path / "b", seed=9)
    alone.store.restore(3)
    alone.train(4, 5)
    ours, theirs = (dict(process.weights.model.named_parameters()) for process in (whole, alone))
    assert apart(ours, theirs) < 1e-5


def test_8_bit_moments_of_two_ranks_are_the_bytes_of_one(pair, tmp_path) -> None:
    small = MOVING.model_copy(update={"moments": "8bit"})
    many = Process(pair, folder=tmp_path, optimizer=small)
    alone = Process(None, folder=tmp_path, optimizer=small, seed=9)
    many.train(1, 3)
    many.store.save(3, {})
    alone.store.restore(3)
    ours, theirs = many.engine.optimizer.moments(), alone.engine.optimizer.moments()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    many.train(4, 6), alone.train(4, 6)
    again = Process(pair, folder=tmp_path, optimizer=small, seed=4)
    again.store.restore(3)
    again.train(4, 6)
    assert again.weights.digest() == many.weights.digest()
    one, two = (dict(process.weights.model.named_parameters()) for process in (many, alone))
    assert apart(one, two) < 0.01
    with pytest.raises(RecordError, match=r"optimizer\.moments"):
        Process(pair, folder=tmp_path).store.restore(3)


def test_scores_and_weights_in_bfloat16_are_those_of_one_process(pair) -> None:
    many, alone = Process(pair, dtype=torch.bfloat16), Process(None, dtype=torch.bfloat16)
    trajectories = [each.trajectory for each in group_samples(num_groups=3)]
    for step in (1, 2, 3):
        got, wanted = (asyncio.run(process.engine.score(trajectories)) for process in (many, alone))
        assert got == wanted  # the bits, after every update
        many.train(step, step)
        # The sums of the gradient are in another order; from there on the two would drift apart.
        alone.engine.optimizer.restore(many.engine.optimizer.weights(), {})
        assert many.weights.digest() == alone.weights.digest() and many.weights.version == step


def test_what_is_not_finite_changes_nothing_on_any_rank(pair) -> None:
    samples = group_samples(seed=1)
    broken = dataclasses.replace(samples[0], advantages=floats([float("nan")] * len(samples[0].advantages)))
    process = Process(pair)
    with pytest.raises(EngineError, match="not finite"):
        asyncio.run(process.step(make_plan(1, [*samples[1:], broken], GRPO, SECTION)))
    assert process.weights.version == 0 and process.weights.digest() == PublishedWeights(build("dense")).digest()
    process.train(1, 2)
    after = process.weights.digest()
    twin = Process(pair)
    twin.train(1, 2)
    assert after == twin.weights.digest()
    with pytest.raises(RecordError, match="another model"):
        twin.engine.optimizer.restore({"odd": torch.zeros(1)}, {})


@given(sizes=st.lists(st.integers(1, 5), max_size=6), num_ranks=st.integers(1, 4), unit=st.sampled_from([1, 2]))
def test_every_sample_is_dealt_once_and_ranks_make_equally_many_passes(sizes, num_ranks, unit) -> None:
    rows = tuple(
        tuple(sample([1] * (2 + n), [0] + [1] * (1 + n), name=f"{r}.{n}") for n in range(size * unit))
        for r, size in enumerate(sizes)
    )
    dealt = deal(rows, num_ranks, unit=unit)
    assert len(dealt) == num_ranks and len({len(own) for own in dealt}) == 1
    placed = sorted((place, row) for own in dealt for place, row in own if place >= 0)
    names = [each.trajectory.episode_id for _, row in placed for each in row]
    assert names == [each.trajectory.episode_id for row in rows for each in row]
    assert all(len(row) % unit == 0 for _, row in placed)
    if sum(sizes) >= num_ranks:
        assert all(any(place >= 0 for place, _ in own) for own in dealt)
