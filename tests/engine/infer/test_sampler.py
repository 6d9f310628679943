"""Tokens and log-probabilities: worked values, the right distribution, nothing but the row matters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engine.infer.sampler import Draws, sample, uniforms
from tandem.kernels.functions import row_logprobs


def draws(
    count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, index: int = 0
) -> Draws:
    """``count`` rows with the same parameters and seeds that count up."""
    return Draws(
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int64),
        np.full(count, top_p),
        np.arange(seed, seed + count).astype(np.uint64),
        np.full(count, index),
    )


def joined(*parts: Draws) -> Draws:
    return Draws(*(np.concatenate([getattr(part, name) for part in parts]) for name in Draws.__slots__))


def repeated(logits: list[float], count: int) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float32).repeat(count, 1)


def random_logits(rows: int, size: int = 500, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("temperature", "expected"), [(1.0, -0.407606), (0.6, -0.202573), (0.5, -0.142932), (2.0, -0.680270)]
)
def test_temperature(temperature: float, expected: float) -> None:
    tokens, logprobs = sample(repeated([2.0, 1.0, 0.0], 64), draws(64, temperature=temperature))
    assert set(tokens) == {0, 1, 2}
    assert logprobs[tokens == 0] == pytest.approx(expected, abs=1e-6)


def test_top_p_renormalises_over_what_it_keeps() -> None:
    tokens, logprobs = sample(repeated([2.0, 1.0, 0.0], 200), draws(200, top_p=0.9))
    assert set(tokens) == {0, 1}
    assert logprobs[tokens == 0] == pytest.approx(-0.313262, abs=1e-6)


def test_greedy_reports_the_plain_distribution() -> None:
    logits = repeated([1.0, 2.0, 0.0], 3)
    tokens, logprobs = sample(logits, draws(3, temperature=0.0, top_k=1, top_p=0.1))
    assert list(tokens) == [1, 1, 1]
    assert logprobs == pytest.approx(-0.407606, abs=1e-6)


def test_top_k_comes_first_and_ties_stay_together() -> None:
    tokens, logprobs = sample(repeated([3.0, 2.0, 2.0, 1.0], 300), draws(300, top_k=2))
    assert set(tokens) == {0, 1, 2}
    whole = torch.log_softmax(torch.tensor([3.0, 2.0, 2.0]), 0)
    assert logprobs == pytest.approx(whole.numpy()[tokens], abs=1e-6)
    # Of the three that top-k leaves, the first has 0.576: it reaches 0.55 alone, which it would not among all four.
    tokens, logprobs = sample(repeated([3.0, 2.0, 2.0, 1.9], 50), draws(50, top_k=2, top_p=0.55))
    assert set(tokens) == {0} and logprobs == pytest.approx(0.0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (0, 0.7), (30, 0.8)])
def test_frequencies_are_the_reported_probabilities(top_k: int, top_p: float) -> None:
    count = 20000
    tokens, logprobs = sample(random_logits(1, 60).repeat(count, 1), draws(count, top_k=top_k, top_p=top_p, seed=7))
    share = np.bincount(tokens, minlength=60) / count
    claimed = np.zeros(60)
    claimed[tokens] = np.exp(logprobs)
    assert claimed.sum() == pytest.approx(1, abs=2e-3)
    assert np.abs(share - claimed).max() < 4.5 * np.sqrt(0.25 / count)


def test_top_p_keeps_the_fewest_that_reach_it_even_behind_the_shortlist() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :10] = 0.5
    logits += torch.linspace(0, 1e-3, 5000)  # no ties, an almost flat row: a nucleus of thousands
    probabilities = torch.softmax(logits[0].double(), 0).sort(descending=True).values.cumsum(0)
    kept = int((probabilities < 0.9).sum()) + 1
    _, logprobs = sample(logits.clone(), draws(1, top_p=0.9))
    edited = logits.clone()
    least = edited[0].sort(descending=True).values[kept - 1]
    edited[0, edited[0] < least] = -torch.inf
    tokens, expected = sample(edited, draws(1))
    assert kept > 1024 and logprobs[0] == expected[0] and edited[0, tokens[0]] > -torch.inf


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_see_its_mates(threads: int) -> None:
    """Every kind of parameters in one batch: the same token and the same bits as alone, at any place."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = random_logits(12, 49152)
        kinds = [
            draws(2, temperature=0.7, seed=1), draws(2, temperature=0.0), draws(2, top_k=5, seed=3, index=9),
            draws(2, top_p=0.5, temperature=1.3, seed=5), draws(2, top_k=50, top_p=0.9, seed=7), draws(2, seed=11),
        ]  # fmt: skip
        together = joined(*kinds)
        tokens, logprobs = sample(logits.clone(), together)
        for row in range(12):
            one = Draws(*(getattr(together, name)[row : row + 1] for name in Draws.__slots__))
            token, logprob = sample(logits[row : row + 1].clone(), one)
            assert (token[0], logprob[0]) == (tokens[row], logprobs[row])
        order = np.random.default_rng(0).permutation(12)
        shuffled = Draws(*(getattr(together, name)[order] for name in Draws.__slots__))
        again, same = sample(logits[order].clone(), shuffled)
        assert np.array_equal(again, tokens[order]) and np.array_equal(same, logprobs[order])
    finally:
        torch.set_num_threads(before)


def test_log_probabilities_have_the_bits_of_training() -> None:
    logits = random_logits(8, 49152)
    tokens, logprobs = sample(logits.clone(), draws(8, temperature=0.8))
    trained = row_logprobs(logits, torch.full((8,), 0.8))
    assert np.array_equal(trained.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].numpy(), logprobs)


def test_draws_are_a_function_of_seed_and_index() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(500)
    index = np.tile(np.arange(500), 200)
    u = uniforms(seeds, index)
    assert u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) == len(u)
    assert np.array_equal(uniforms(seeds[777:900], index[777:900]), u[777:900])
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert abs(counts - 1000).max() < 160  # five standard deviations
    table = u.reshape(200, 500)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.015


def test_a_certain_token_and_an_impossible_one() -> None:
    logits = torch.full((100, 50), -torch.inf)
    logits[:, 49] = 0.0
    tokens, logprobs = sample(logits, draws(100))
    assert set(tokens) == {49} and set(logprobs) == {0.0}
