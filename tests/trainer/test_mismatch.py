"""When a gap between sampler and trainer is told, and what is said."""

from __future__ import annotations

import pytest

from tandem.trainer.mismatch import GapAlarm


def gap(mean: float) -> dict[str, float]:
    return {"logprob_gap_mean": mean, "logprob_gap_max": 3 * mean, "logprob_gap_outside": 0.25}


def test_an_exact_engine_may_have_none_and_another_a_little() -> None:
    exact = GapAlarm(None, is_exact=True, is_corrected=False)
    assert exact.hear(gap(0.0)) is None
    assert "tandem verify" in (exact.hear(gap(1e-7)) or "")
    other = GapAlarm(None, is_exact=False, is_corrected=False)
    assert other.hear(gap(0.09)) is None
    said = other.hear(gap(0.12)) or ""
    assert "0.12 on average, 0.36 at most, 25.0% of them" in said and 'algorithm.importance = "truncated"' in said


def test_it_is_told_once_until_it_is_over() -> None:
    alarm = GapAlarm(0.01, is_exact=False, is_corrected=True)
    steps = [0.5, 0.5, None, 0.5, 0.0, 0.5]
    told = [alarm.hear({} if mean is None else gap(mean)) for mean in steps]
    assert [said is not None for said in told] == [True, False, False, False, False, True]
    assert "algorithm.importance corrects" in (told[0] or "")


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_limit_that_is_given_is_the_limit(is_exact) -> None:
    alarm = GapAlarm(1.0, is_exact=is_exact, is_corrected=False)
    assert alarm.hear(gap(1.0)) is None and alarm.hear(gap(1.1)) is not None
