"""States of a box and the moves between them.

Owns: the table of allowed moves; who may fork, pause or kill is answered here and nowhere else.
Refuses: any move not in the table. Invariant: ``DEAD`` is final; ``KILLING`` leads nowhere else.
"""

from __future__ import annotations

from tandem.core.boxes import SandboxState as State
from tandem.core.errors import SandboxError, SandboxGone

MOVES: dict[State, frozenset[State]] = {
    State.CREATING: frozenset({State.RUNNING, State.KILLING, State.DEAD}),
    State.RUNNING: frozenset({State.PAUSING, State.SNAPSHOTTING, State.FORKING, State.KILLING, State.DEAD}),
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.KILLING, State.DEAD}),
    State.PAUSED: frozenset({State.RESUMING, State.SNAPSHOTTING, State.FORKING, State.KILLING, State.DEAD}),
    State.RESUMING: frozenset({State.RUNNING, State.PAUSED, State.KILLING, State.DEAD}),
    State.SNAPSHOTTING: frozenset({State.RUNNING, State.PAUSED, State.KILLING, State.DEAD}),
    State.FORKING: frozenset({State.RUNNING, State.PAUSED, State.KILLING, State.DEAD}),
    State.KILLING: frozenset({State.DEAD}),
    State.DEAD: frozenset(),
}


class Lifecycle:
    """The state of one box."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.state = State.CREATING

    def move(self, to: State) -> None:
        """Raises ``SandboxGone`` from a dead or dying box, ``SandboxError`` for any other move not allowed."""
        if to not in MOVES[self.state]:
            if self.state in (State.KILLING, State.DEAD):
                raise SandboxGone(f"sandbox {self.sandbox_id} is {self.state}", hint="create a new one")
            raise SandboxError(f"sandbox {self.sandbox_id} cannot go from {self.state} to {to}")
        self.state = to

    def require_running(self) -> None:
        if self.state is State.RUNNING:
            return
        if self.state in (State.KILLING, State.DEAD):
            raise SandboxGone(f"sandbox {self.sandbox_id} is {self.state}", hint="create a new one")
        raise SandboxError(f"sandbox {self.sandbox_id} is {self.state}, not running")
