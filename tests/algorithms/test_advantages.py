"""Worked values W1, W8, case 7, case 8."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.algorithms.advantages import centred, generalised, leave_one_out, standardised


def test_w1_centred_and_both_deviations() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert centred(rewards) == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-9)
    assert standardised(rewards) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-9)
    assert standardised(rewards, population=True) == pytest.approx(
        [1.732051, -0.577350, -0.577350, -0.577350], abs=1e-6
    )


@pytest.mark.parametrize("credit", [centred, standardised, leave_one_out])
@pytest.mark.parametrize("rewards", [[0.3] * 7, [0.1 + 0.2, 0.3, 0.3], [1.0], [None, 0.4, None], [], [None]])
def test_no_contrast_is_exactly_zero(credit, rewards) -> None:
    assert credit(rewards) == [None if reward is None else 0.0 for reward in rewards]


def test_leave_one_out() -> None:
    assert leave_one_out([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


def test_case_7_missing_reward_is_excluded() -> None:
    advantages = standardised([1.0, None, 0.0, 1.0])
    assert advantages[1] is None
    assert [a for a in advantages if a is not None] == pytest.approx([0.577350, -1.154701, 0.577350], abs=1e-6)


def test_case_8_a_crash_is_not_a_zero() -> None:
    assert centred([1.0, 0.0, None]) == [0.5, -0.5, None]


@pytest.mark.parametrize("wrong", ["1", True, float("nan"), [1.0]])
def test_a_reward_that_is_no_number_is_named(wrong) -> None:
    with pytest.raises(TypeError, match="reward 1"):
        centred([0.0, wrong])


@pytest.mark.parametrize(
    ("discount", "decay", "expected"),
    [
        (1.0, 1.0, [1, 1, 0, 0, 1, 1]),
        (0.5, 1.0, [0.125, 0.25, 0, 0, 0.5, 1]),
        (1.0, 0.95, [0.857375, 0.9025, 0, 0, 0.95, 1]),
    ],
)
def test_w8_credit_crosses_observations(discount, decay, expected) -> None:
    mask = [1, 1, 0, 0, 1, 1]
    got = generalised(1.0, [0.0] * 6, mask, discount=discount, decay=decay)
    assert got == pytest.approx(expected, abs=1e-9)
    on_observations = [0.0, 0.0, 123.0, float("nan"), 0.0, 0.0, 77.0, -5.0]
    longer = generalised(1.0, on_observations, [*mask, 0, 0], discount=discount, decay=decay)
    assert np.array_equal(longer, [*got, 0.0, 0.0])


def test_estimation_with_values_matches_the_definition() -> None:
    values, gamma, lam = [0.5, -0.2, 0.9], 0.9, 0.8
    deltas = [gamma * -0.2 - 0.5, gamma * 0.9 + 0.2, 2.0 - 0.9]
    expected = [sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, 3)) for i in range(3)]
    assert generalised(2.0, values, [1, 1, 1], discount=gamma, decay=lam) == pytest.approx(expected, abs=1e-12)


def test_values_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="5 and 6"):
        generalised(1.0, [0.0] * 5, [1] * 6, discount=1.0, decay=1.0)
