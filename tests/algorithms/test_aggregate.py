"""Worked values W2 and W3: one normaliser, whatever the split."""

from __future__ import annotations

import itertools

import pytest
from bare_methods import GRPO

from tandem.algorithms.aggregate import token_share
from tandem.algorithms.catalog.grpo import DAPO, DR_GRPO, RLOO


def step_loss(spec, micro_batches: list[list[list[float]]]) -> float:
    """Sum over micro-batches (and ranks), sequences, tokens, each with its share of the whole step."""
    sequences = list(itertools.chain.from_iterable(micro_batches))
    num_loss_tokens, num_sequences = sum(map(len, sequences)), sum(1 for sequence in sequences if sequence)
    return sum(
        loss * token_share(
            spec, sequence_tokens=len(sequence), num_loss_tokens=num_loss_tokens, num_sequences=num_sequences
        )
        for batch in micro_batches for sequence in batch for loss in sequence
    )  # fmt: skip


def test_w2_three_means() -> None:
    import dataclasses

    batch = [[[-1.0] * 2, [1.0] * 6]]
    assert step_loss(DAPO, batch) == pytest.approx(0.5, abs=1e-9)
    assert step_loss(GRPO, batch) == pytest.approx(0.0, abs=1e-9)
    assert step_loss(dataclasses.replace(DR_GRPO, length_cap=8), batch) == pytest.approx(0.25, abs=1e-9)
    assert step_loss(RLOO, batch) == pytest.approx(2.0, abs=1e-9)  # (-2 + 6) / 2: each answer is one action


def test_w2_an_all_masked_row_does_not_count() -> None:
    assert step_loss(DAPO, [[[-1.0] * 2, [1.0] * 6, []]]) == pytest.approx(0.5, abs=1e-9)
    assert step_loss(GRPO, [[[-1.0] * 2, [], [1.0] * 6]]) == pytest.approx(0.0, abs=1e-9)


def test_w3_any_split_gives_the_token_mean() -> None:
    first, second = [1.0] * 2, [3.0] * 6
    splits = [
        [[first, second]],
        [[first], [second]],
        [[], [first], [], [second]],  # four ranks, two of them empty
        [[second], [first], [], [], [], [], [], []],
    ]
    for split in splits:
        assert step_loss(DAPO, split) == pytest.approx(2.5, abs=1e-9)
