"""Every method's step is the same however it is cut and in whatever order its samples come; and the entropy bonus."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.credit import demonstration, preference, settle
from tandem.algorithms.spec import BUILTIN, AlgorithmSpec, Data, algorithms
from tandem.config.sections.engine import TrainSection
from tandem.core.types import Sample, floats
from tests.engine.train.test_step import full_logits
from tests.engine.train.tiny import gradients, group_samples, tiny_model

WHOLE = TrainSection(micro_batch_tokens=4096, share_prefixes=False)
CLOSE = 2e-6  # of the largest entry of a gradient: float32 sums of other orders


def method(name: str) -> AlgorithmSpec:
    found = algorithms().resolve(name)
    assert isinstance(found, AlgorithmSpec)
    return found


def streams(sample: Sample, seed: int) -> Sample:
    """What the roles beside would say of its tokens."""
    rng = np.random.default_rng(seed)
    draw = lambda: floats(rng.normal(-3.8, 0.3, len(sample.advantages)).tolist())  # noqa: E731
    return dataclasses.replace(sample, reference_logprobs=draw(), values=draw(), reward=float(rng.normal()))


@functools.cache
def units(name: str) -> tuple[tuple[Sample, ...], ...]:
    """Samples of a step that stay together: pairs of preferences, else one each."""
    spec = method(name)
    made = [streams(each, seed) for seed, each in enumerate(group_samples(num_groups=2, size=3))]
    if spec.data is Data.EPISODES:
        return tuple((each,) for each in settle(spec, made))
    finished = [
        dataclasses.replace(
            demonstration(f"d{number}", each.trajectory.token_ids, each.trajectory.loss_mask),
            reference_logprobs=each.reference_logprobs,
        )
        for number, each in enumerate(made)
    ]
    if spec.data is Data.DEMONSTRATIONS:
        return tuple((each,) for each in finished)
    return tuple(preference(*finished[at : at + 2]) for at in range(0, len(finished), 2))


@functools.cache
def whole(name: str) -> dict[str, torch.Tensor]:
    return gradients(tiny_model(), method(name), [each for unit in units(name) for each in unit], WHOLE)


@pytest.mark.parametrize("name", sorted(BUILTIN.keys() - {"reward"}))  # whose model has a score, and no tokens
@settings(max_examples=4, deadline=None)
@given(tokens=st.integers(16, 200), share=st.booleans(), draw=st.randoms(use_true_random=False))
def test_the_gradient_depends_on_no_cut_and_no_order(name: str, tokens: int, share: bool, draw) -> None:
    order = list(units(name))
    draw.shuffle(order)
    section = TrainSection(micro_batch_tokens=tokens, share_prefixes=share)
    found = gradients(tiny_model(), method(name), [each for unit in order for each in unit], section)
    expected = whole(name)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 1e-5, "nothing is learned"
    for key, gradient in expected.items():
        assert float((found[key] - gradient).abs().max()) <= CLOSE * largest, key


def test_the_entropy_bonus_is_its_formula() -> None:
    """- weight x entropy of the distribution that was sampled from, weighed as every token's loss; in float64."""
    samples = group_samples(num_groups=1, size=3, temperature=0.7)
    plain = dataclasses.replace(method("grpo"), kl_weight=0.0)
    bonus = dataclasses.replace(plain, entropy_weight=0.3)
    model = tiny_model()
    terms = []
    for each in samples:
        logits = full_logits(model, list(each.trajectory.token_ids)).double() / each.trajectory.temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        own = [entropy[t - 1] for t, flag in enumerate(each.trajectory.loss_mask) if flag]
        terms.append(torch.stack(own).mean())
    (-0.3 * torch.stack(terms).mean()).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    with_bonus, without = (gradients(tiny_model(), spec, samples, TrainSection()) for spec in (bonus, plain))
    largest = max(float(each.abs().max()) for each in wanted.values() if each is not None)
    assert largest > 1e-4
    for name, gradient in wanted.items():
        assert gradient is not None
        assert float((with_bonus[name] - without[name] - gradient).abs().max()) <= 5e-6 * max(1.0, largest), name
