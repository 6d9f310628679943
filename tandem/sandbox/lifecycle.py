"""States of a box and the moves between them.

Owns: the table of allowed moves; who may fork, pause or kill is answered here and nowhere else.
Refuses: any move not in the table. Invariants: ``DEAD`` is final; ``KILLING`` leads nowhere else; a move that comes to
nothing leads back to where the box rested.
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
AT_REST = frozenset({State.RUNNING, State.PAUSED})
ENDING = frozenset({State.KILLING, State.DEAD})
BESIDE = frozenset({State.SNAPSHOTTING, State.FORKING})  # the box goes on as it was meanwhile


class Lifecycle:
    """The state of one box."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.state = State.CREATING
        self.rest = State.CREATING  # where it was last at rest

    @property
    def usable(self) -> bool:
        """Whether its processes run."""
        return self.state is State.RUNNING or (self.state in BESIDE and self.rest is State.RUNNING)

    def start(self, state: State) -> None:
        """Begin at rest: a box just made, or one found again."""
        assert self.state is State.CREATING and state in AT_REST
        self.state = self.rest = state

    def check(self, to: State) -> None:
        """Raises ``SandboxGone`` from a dead or dying box, ``SandboxError`` for any other move not allowed."""
        if to not in MOVES[self.state]:
            if self.state in ENDING:
                raise SandboxGone(f"sandbox {self.sandbox_id} is {self.state}", hint="create a new one")
            raise SandboxError(f"sandbox {self.sandbox_id} cannot go from {self.state} to {to}")

    def move(self, to: State) -> None:
        """As ``check``, and then it is there."""
        self.check(to)
        self.state = to
        if to in AT_REST:
            self.rest = to

    def require_running(self) -> None:
        if self.usable:
            return
        if self.state in ENDING:
            raise SandboxGone(f"sandbox {self.sandbox_id} is {self.state}", hint="create a new one")
        raise SandboxError(f"sandbox {self.sandbox_id} is {self.state}, not running", hint="resume it first")
