from __future__ import annotations

import pytest

from tandem.core.boxes import SandboxState as State
from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.lifecycle import MOVES, Lifecycle


def test_every_state_has_moves_and_all_but_dead_can_end() -> None:
    assert set(MOVES) == set(State)
    assert MOVES[State.DEAD] == frozenset()
    for state, moves in MOVES.items():
        assert state not in moves
        if state is not State.DEAD:
            assert State.DEAD in moves
        if state not in (State.DEAD, State.KILLING):
            assert State.KILLING in moves


def test_a_move_not_in_the_table_names_box_and_states() -> None:
    lifecycle = Lifecycle("sbx-1")
    with pytest.raises(SandboxError, match="sbx-1 cannot go from creating to paused"):
        lifecycle.move(State.PAUSED)
    lifecycle.move(State.RUNNING)
    lifecycle.require_running()
    lifecycle.move(State.PAUSING)
    with pytest.raises(SandboxError, match="sbx-1 is pausing"):
        lifecycle.require_running()


def test_the_dead_stay_dead() -> None:
    lifecycle = Lifecycle("sbx-1")
    lifecycle.move(State.DEAD)
    with pytest.raises(SandboxGone, match="sbx-1 is dead"):
        lifecycle.move(State.RUNNING)
    with pytest.raises(SandboxGone):
        lifecycle.require_running()
