"""Losses over pairs of scores."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.algorithms.pairs import bradley_terry


def test_bradley_terry_is_the_negative_log_of_the_win_probability() -> None:
    scores = torch.tensor([2.0, 0.5, -1.0, 1.0], requires_grad=True)
    loss, margin = bradley_terry(scores)
    expected = [-math.log(1 / (1 + math.exp(-1.5))), -math.log(1 / (1 + math.exp(2.0)))]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6) and margin.tolist() == [1.5, -2.0]
    loss.sum().backward()
    assert scores.grad is not None
    pull = [1 - 1 / (1 + math.exp(-1.5)), 1 - 1 / (1 + math.exp(2.0))]
    assert scores.grad.tolist() == pytest.approx([-pull[0], pull[0], -pull[1], pull[1]], abs=1e-6)


def test_a_hopeless_margin_has_a_finite_loss() -> None:
    loss, _ = bradley_terry(torch.tensor([-500.0, 500.0]), 0.1)
    assert torch.isfinite(loss).all()
