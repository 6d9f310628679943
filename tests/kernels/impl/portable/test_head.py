"""Rows of logits by the operations that run everywhere: what the C kernels promise, they promise too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import EngineError
from tandem.kernels.impl.portable import head


def logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 49152])
def test_log_probabilities_and_entropies_are_right(size: int) -> None:
    rows, temperature = logits(5, size), torch.tensor([0.3, 0.8, 1.0, 1.7, 5.0])
    exact = torch.log_softmax(rows.double() / temperature[:, None], 1)
    found = head.row_logprobs(rows, temperature)
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=1e-6)
    targets = torch.arange(5) % size
    chosen, entropies = head.target_logprobs(rows, temperature, targets)
    assert torch.equal(chosen, found.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(1), atol=2e-5, rtol=1e-5)


def test_a_row_that_excludes_tokens_has_a_finite_entropy() -> None:
    logprobs, entropies = head.target_logprobs(
        torch.tensor([[0.0, -torch.inf, 0.0, -1e9]]), torch.ones(1), torch.tensor([1])
    )
    assert logprobs[0] == -torch.inf
    torch.testing.assert_close(entropies, torch.tensor([2.0]).log())


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0, exclude_max=True))
def test_a_draw_inverts_the_cumulative_distribution(size: int, seed: int, share: float) -> None:
    rows = logits(1, size, seed)
    rows[0, torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.3] = -torch.inf
    rows[0, seed % size] = 1.0
    tokens, logprobs = head.draw(rows, torch.ones(1), torch.tensor([share], dtype=torch.float64))
    token = int(tokens[0])
    cumulative = torch.softmax(rows[0].double(), 0).cumsum(0)
    before = float(cumulative[token - 1]) if token else 0.0
    assert before - 1e-5 <= share <= float(cumulative[token]) + 1e-5
    assert rows[0, token] > -torch.inf
    assert logprobs[0] == head.row_logprobs(rows, torch.ones(1))[0, token]


def test_the_last_draw_is_a_possible_token_and_a_negative_one_the_first_of_the_likeliest() -> None:
    rows = torch.full((2, 2100), -torch.inf)
    rows[:, [5, 1030, 1040]] = 0.0
    last = 1 - 2**-53
    tokens, logprobs = head.draw(rows, torch.ones(2), torch.tensor([last, -1.0], dtype=torch.float64))
    assert tokens.tolist() == [1040, 5]
    torch.testing.assert_close(logprobs, -torch.full((2,), 3.0).log())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_distribution_is_counted(broken: float) -> None:
    rows = logits(3, 50)
    rows[1] = broken
    with pytest.raises(EngineError, match="1 of 3 rows"):
        head.draw(rows, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))
