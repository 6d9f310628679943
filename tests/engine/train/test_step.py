"""One plan, one step: the numbers do not depend on how it is cut (W3, W4, cases 2, 3, 4)."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest
import torch
from bare_methods import GRPO

from tandem.algorithms.catalog.grpo import DAPO, DR_GRPO, GSPO, RLOO
from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration
from tandem.algorithms.losses import LossTokens
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError
from tandem.core.types import BatchPlan, floats, ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.trainer.batcher import make_plan
from tests.engine.train.tiny import VOCABULARY, gradients, group_samples, sample, tiny_model, train

WHOLE = TrainSection(micro_batch_tokens=4096, share_prefixes=False)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    largest = max(float(g.abs().max()) for g in one.values())
    assert largest > 1e-4
    for name, gradient in one.items():
        assert torch.allclose(gradient, other[name], atol=1e-6 * max(1.0, largest), rtol=1e-5), name


@pytest.mark.parametrize("spec", [GRPO, DAPO, DR_GRPO, GSPO, RLOO], ids=lambda spec: spec.name)
def test_gradient_is_the_same_for_every_split_and_with_shared_prefixes(spec) -> None:
    samples = group_samples()
    whole = gradients(tiny_model(), spec, samples, WHOLE)
    for tokens in (16, 48, 110, 4096):
        for share in (True, False):
            section = TrainSection(micro_batch_tokens=tokens, share_prefixes=share)
            assert_close(whole, gradients(tiny_model(), spec, samples, section))


def test_a_loss_of_ones_own_is_weighed_as_the_methods_is() -> None:
    """GRPO's loss written by hand gives GRPO's gradient, however the step is cut; a flat sample is not left out."""
    samples = group_samples()

    def by_hand(tokens: LossTokens) -> torch.Tensor:
        ratio = (tokens.logprobs_N - tokens.sampled_N).exp()
        return -torch.minimum(ratio * tokens.advantages_N, ratio.clamp(0.8, 1.2) * tokens.advantages_N)

    own = dataclasses.replace(GRPO, flat_learns=True)
    for tokens in (16, 4096):
        section = TrainSection(micro_batch_tokens=tokens)
        assert_close(
            gradients(tiny_model(), GRPO, samples, WHOLE), gradients(tiny_model(), own, samples, section, by_hand)
        )
    flat = [dataclasses.replace(each, advantages=floats([0.0] * len(each.advantages))) for each in samples]
    moved = gradients(tiny_model(), own, flat, WHOLE, lambda tokens: -tokens.logprobs_N)
    assert max(float(each.abs().max()) for each in moved.values()) > 1e-4


def test_recomputed_activations_give_the_same_gradient() -> None:
    samples = group_samples()
    again = gradients(tiny_model(), GRPO, samples, WHOLE.model_copy(update={"checkpoint_activations": True}))
    assert_close(gradients(tiny_model(), GRPO, samples, WHOLE), again)


def test_the_loss_and_its_gradient_equal_a_plain_transcription() -> None:
    """Padded, one sample at a time, token by token: -min(r A, clip(r) A), mean per sequence, mean of sequences."""
    samples = group_samples(temperature=0.7)
    model = tiny_model()
    total = torch.zeros(())
    for one in samples:
        logits = full_logits(model, list(one.trajectory.token_ids)) / 0.7
        terms = []
        for t, flag in enumerate(one.trajectory.loss_mask):
            if flag:
                logprob = logits[t - 1].log_softmax(-1)[one.trajectory.token_ids[t]]
                ratio = (logprob - one.trajectory.logprobs[t]).exp()
                a = one.advantages[t]
                terms.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
        total = total + torch.stack(terms).mean() / len(samples)
    model.zero_grad()
    total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert_close(expected, gradients(model, GRPO, samples, TrainSection()))
    (result,) = train(tiny_model(), GRPO, samples)
    assert result.loss == pytest.approx(float(total.detach()), abs=1e-6)


def full_logits(model, token_ids: list[int]) -> torch.Tensor:
    from tandem.engine.train.batch import lay_out
    from tandem.models.attention import AttentionContext

    layout = lay_out([ids(token_ids)], share_prefixes=False, device=torch.device("cpu"))
    hidden = model(layout.ids_T, layout.positions_T, AttentionContext(keys=layout.keys))
    return hidden @ model.head_weight.T


def test_w3_token_mean_over_any_split() -> None:
    """P = 2 tokens and Q = 6 tokens, each token's loss forced to 1 and 3: advantages -1 and -3 at ratio 1."""
    model = tiny_model()
    with torch.no_grad():
        model.embedding.weight.zero_()  # uniform model: log-probability -ln V everywhere
    uniform = -math.log(VOCABULARY)
    first = sample([1] * 3, [0, 1, 1], advantage=-1.0, logprob=uniform)
    second = sample([2] * 7, [0] + [1] * 6, advantage=-3.0, logprob=uniform)
    for rows in (((first, second),), ((first,), (second,)), ((), (second,), (), (first,))):
        plan = BatchPlan(step=1, rows=tuple(row for row in rows if row), num_loss_tokens=8, num_sequences=2)
        (result,) = train(model, DAPO, [], plan=plan, optimizer=OptimizerSection(learning_rate=0.0, warmup_steps=0))
        assert result.loss == pytest.approx(2.5, abs=1e-6)


def test_w4_temperature_on_the_trainers_path() -> None:
    for temperature in (1.0, 0.6, 0.5, 2.0):
        model = tiny_model()
        one = sample([3, 5, 7], [0, 1, 1], logprob=0.0, temperature=temperature)
        expected = (full_logits(model, [3, 5, 7]) / temperature).log_softmax(-1)
        wanted = float((expected[0, 5] + expected[1, 7]).detach())  # an answer is one action: its tokens are summed
        (result,) = train(model, RLOO, [one])
        assert result.loss == pytest.approx(-wanted, abs=1e-6)


def test_case_2_observations_are_context_and_nothing_else() -> None:
    flags = [0] + [1] * 5 + [0] * 7 + [1] * 4
    tokens = list(range(1, 18))
    plain, other = sample(tokens, flags), sample(tokens, flags)
    # Whatever is stored on observation tokens (an advantage, a log-probability) is never read.
    spoiled = dataclasses.replace(
        other,
        advantages=floats([a if f else 1e9 for a, f in zip(other.advantages, flags, strict=True)]),
        trajectory=dataclasses.replace(
            other.trajectory,
            logprobs=floats([p if f else -50.0 for p, f in zip(other.trajectory.logprobs, flags, strict=True)]),
        ),
    )
    one, two = gradients(tiny_model(), GRPO, [plain], WHOLE), gradients(tiny_model(), GRPO, [spoiled], WHOLE)
    assert all(torch.equal(one[name], two[name]) for name in one)
    (first,), (second,) = train(tiny_model(), GRPO, [plain]), train(tiny_model(), GRPO, [spoiled])
    assert first.metrics["kl_sampler_k3"] == second.metrics["kl_sampler_k3"]
    assert first.num_loss_tokens == 9


def test_case_2_tokens_after_the_last_of_the_policys_change_nothing() -> None:
    one = gradients(tiny_model(), GRPO, [sample([1, 2, 3], [0, 1, 1])], WHOLE)
    two = gradients(tiny_model(), GRPO, [sample([1, 2, 3, 9, 9, 9], [0, 1, 1, 0, 0, 0])], WHOLE)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_case_3_the_end_token_is_trained_whatever_its_id() -> None:
    """Packed batches hold no padding, so an end id that elsewhere doubles as pad id is a token like any other."""
    end = 2
    samples = [
        demonstration("a", ids([9, 5, 6, end]), mask([0, 1, 1, 1])),
        demonstration("b", ids([9, 5, end]), mask([0, 1, 1])),
    ]
    plan = make_plan(1, samples, SFT, TrainSection())
    assert plan.num_loss_tokens == 5
    model = tiny_model()
    (result,) = train(model, SFT, samples)
    expected = [full_logits(tiny_model(), tokens).log_softmax(-1) for tokens in ([9, 5, 6, end], [9, 5, end])]
    total = -(expected[0][0, 5] + expected[0][1, 6] + expected[0][2, end] + expected[1][0, 5] + expected[1][1, end])
    assert result.loss == pytest.approx(float(total.detach()) / 5, abs=1e-6)
    assert result.metrics["ce_loss"] == pytest.approx(result.loss, abs=1e-6)


def test_case_4_the_first_response_token_is_trained() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.embedding.weight.zero_()
    one = demonstration("d", ids([1, 2, 3, 4, 5]), mask([0, 1, 1, 0, 1]))
    (result,) = train(model, SFT, [one], optimizer=OptimizerSection(learning_rate=0.0, warmup_steps=0))
    assert result.num_loss_tokens == 3
    assert result.loss == pytest.approx(math.log(VOCABULARY), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_plans_give_the_same_bits(dtype) -> None:
    models = [tiny_model(dtype=dtype) for _ in range(2)]
    section = TrainSection(micro_batch_tokens=64)
    results = [train(model, GRPO, group_samples(), section=section, steps=3) for model in models]
    assert [dataclasses.replace(r, train_s=0) for r in results[0]] == [
        dataclasses.replace(r, train_s=0) for r in results[1]
    ]
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_supervised_steps_learn_and_reinforcement_raises_what_is_rewarded() -> None:
    lesson = [demonstration("d", ids([1, 2, 3, 4, 5, 6]), mask([0, 1, 1, 1, 1, 1]))]
    losses = [result.loss for result in train(tiny_model(), SFT, lesson, steps=30)]
    assert losses[-1] < 0.2 * losses[0]
    model = tiny_model()
    good, bad = sample([1, 7], [0, 1], advantage=1.0), sample([1, 8], [0, 1], advantage=-1.0)
    before = full_logits(model, [1])[0].log_softmax(-1).detach()
    train(model, RLOO, [good, bad], steps=3)
    after = full_logits(model, [1])[0].log_softmax(-1).detach()
    assert after[7] > before[7] and after[8] < before[8]


def test_metrics_of_off_policy_and_on_policy_tokens() -> None:
    model = tiny_model()
    exact = float(full_logits(model, [1, 2])[0].log_softmax(-1)[2].detach())
    (result,) = train(model, GRPO, [sample([1, 2, 3], [0, 1, 0], logprob=exact - 0.5, version=0)])
    metrics = result.metrics
    assert metrics["kl_sampler_k1"] == pytest.approx(-0.5, abs=1e-5)
    assert metrics["kl_sampler_k3"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["logprob_gap_outside"] == 0.0
    (far,) = train(tiny_model(), GRPO, [sample([1, 2, 3], [0, 1, 0], logprob=exact - 0.7, version=0)])
    assert far.metrics["logprob_gap_outside"] == 1.0
    assert metrics["ratio_mean"] == metrics["ratio_max"] == pytest.approx(math.exp(0.5), abs=1e-5)
    assert metrics["clip_fraction"] == 1.0 and metrics["entropy"] > 3.0
    assert "ce_loss" not in metrics and "kl_reference" not in metrics
    (stale,) = train(tiny_model(), GRPO, [sample([1, 2, 3], [0, 1, 0], version=-5)])
    assert "logprob_gap_max" not in stale.metrics


def test_a_plan_without_gradient_moves_nothing_at_first_and_loses_nothing() -> None:
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    (result,) = train(model, GRPO, [sample([1, 2], [0, 1], advantage=0.0)])
    assert result.loss == 0.0 and result.grad_norm == 0.0 and result.num_loss_tokens == 1
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_failed_step_changes_nothing_and_the_next_one_is_clean() -> None:
    samples = group_samples()
    broken = dataclasses.replace(samples[0], advantages=floats([float("nan")] * len(samples[0].advantages)))
    model, twin = tiny_model(), tiny_model()
    compute = ComputeQueue()
    weights = PublishedWeights(model)
    optimizer = OptimizerSection(learning_rate=1e-2, warmup_steps=0)
    engine = LocalTrainEngine(
        weights, compute, train=TrainSection(), optimizer=optimizer, algorithm=GRPO, total_steps=1
    )

    async def go() -> None:
        with pytest.raises(EngineError, match="not finite"):
            await engine.step(make_plan(1, [*samples[1:], broken], GRPO, TrainSection(micro_batch_tokens=64)))
        assert weights.version == 0
        await engine.step(make_plan(1, samples, GRPO, TrainSection()))
        assert weights.version == 1

    try:
        asyncio.run(go())
    finally:
        compute.close()
    train(twin, GRPO, samples, optimizer=optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_publish_gives_every_step_its_number_and_an_empty_one_too() -> None:
    compute = ComputeQueue()
    weights = PublishedWeights(tiny_model())
    engine = LocalTrainEngine(
        weights, compute, train=TrainSection(), optimizer=OptimizerSection(), algorithm=GRPO, total_steps=2
    )

    async def go() -> list[int]:
        await engine.step(make_plan(1, group_samples(), GRPO, TrainSection()))
        first = await engine.publish()
        second = await engine.publish()
        await engine.step(make_plan(2, group_samples(), GRPO, TrainSection()))
        return [first.number, second.number, (await engine.publish()).number, weights.version]

    try:
        assert asyncio.run(go()) == [1, 2, 3, 3]
    finally:
        compute.close()


def test_bfloat16_with_masters_tracks_float32_over_200_steps() -> None:
    """At this rate an update is less than half the distance of two bfloat16 weights: rounded weights would stand."""
    rng = np.random.default_rng(0)
    lesson = [demonstration(f"d{n}", ids(rng.integers(1, 40, 9).tolist()), mask([0] + [1] * 8)) for n in range(3)]
    rate = OptimizerSection(learning_rate=5e-5, warmup_steps=0)
    whole, half = (
        [result.loss for result in train(tiny_model(dtype=dtype), SFT, lesson, steps=200, optimizer=rate)]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert whole[-1] < whole[0] - 0.3
    assert max(abs(one - other) for one, other in zip(whole, half, strict=True)) < 0.02
