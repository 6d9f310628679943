"""A count of bytes that outlives its process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import SandboxError
from tandem.sandbox.network.budget import STEP_BYTES, STEPS, Budget
from tandem.sandbox.network.refusal import Refused


@given(st.lists(st.one_of(st.integers(1, 40 * 2**20), st.sampled_from(["killed", "left"]))), st.integers(1, 2**34))
def test_a_restart_never_gives_a_byte_back_and_takes_one_step_at_most(events: list[int | str], limit: int) -> None:
    kept, passed, kills = [0], 0, 0
    budget = Budget(0, kept.append)
    for event in events:
        if isinstance(event, int):
            try:
                budget.count(event, limit)
            except Refused:
                assert budget.used > limit
            passed += event
        else:
            kills += event == "killed"
            if event == "left":
                budget.settle()
                assert kept[-1] == budget.used
            budget = Budget(kept[-1], kept.append)
        assert passed <= budget.used <= passed + kills * min(STEP_BYTES, limit // STEPS)
        assert budget.used <= kept[-1]


def test_few_writes_and_none_that_fails_lets_bytes_pass() -> None:
    kept: list[int] = []
    budget = Budget(0, kept.append)
    for _ in range(1000):
        budget.count(65536, 2**40)
    assert len(kept) <= 1000 * 65536 // STEP_BYTES + 1

    def full(used: int) -> None:
        raise SandboxError("the disk is full")

    with pytest.raises(Refused, match="the disk is full"):
        Budget(0, full).count(1, 100)
