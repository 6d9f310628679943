"""How many bytes a box has had through its proxy, over its whole life: policies and servers come and go.

Owns: the count, and that it is written down before it is used: in steps, so that a killed server counts up to one step
too many and never a byte too few. Refuses: to let anything pass that it cannot write down.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.errors import SandboxError
from tandem.sandbox.network.refusal import Refused

STEP_BYTES = 16 * 2**20
STEPS = 16  # of a small limit: what a killed server counts too many is a part of it


class Budget:
    """``used`` is what was written down of it; ``keep`` writes a new number down, or raises SandboxError."""

    def __init__(self, used: int = 0, keep: Callable[[int], None] = lambda used: None) -> None:
        self.used = self._kept = used
        self._keep = keep

    def count(self, num_bytes: int, limit: int) -> None:
        """Raises Refused: no more may pass."""
        self.used += num_bytes
        if self.used > self._kept:
            self._write(self.used + min(STEP_BYTES, limit // STEPS))
        if self.used > limit:
            raise Refused(f"it has had its {limit} bytes")

    def settle(self) -> None:
        """Nothing passes any more: write down what it was. Raises Refused."""
        if self.used != self._kept:
            self._write(self.used)

    def _write(self, used: int) -> None:
        try:
            self._keep(used)
        except SandboxError as error:
            raise Refused(f"what passes cannot be counted: {error.message}") from error
        self._kept = used
