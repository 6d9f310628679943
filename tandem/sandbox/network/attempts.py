"""What is told of a box's attempts to reach something: each one, up to a rate; beyond it, how many were not told.

Owns: the bound, so that a box cannot fill a log. Invariant: every attempt is told or counted in a later line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

BURST, PER_S = 60, 5.0
SUMMARY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """``target`` is what the box asked for, ``why`` the rule or the reason. ``suppressed``: so many attempts before
    this line were not told one by one; a line without a target tells nothing else."""

    target: str = ""
    allowed: bool = False
    why: str = ""
    suppressed: int = 0


Tell = Callable[[Attempt], None]


class Bucket:
    """So many at once, and so many a second."""

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at = float(burst), -1.0

    def take(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._at >= 0:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    @property
    def wait_s(self) -> float:
        """How long until one more, if nobody else takes it."""
        return max(0.0, (1 - self._left) / self._per_s)


class Attempts:
    """Of one box."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._bucket = Bucket(BURST, PER_S)
        self._suppressed = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, target: str, *, allowed: bool, why: str) -> None:
        if not self._bucket.take():
            self._suppressed += 1
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SUMMARY_S, self.flush)
            return
        suppressed, self._suppressed = self._suppressed, 0
        self._tell(Attempt(target=target[:300], allowed=allowed, why=why[:300], suppressed=suppressed))

    def flush(self) -> None:
        """Tell the number of those not told, if there are any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._suppressed:
            suppressed, self._suppressed = self._suppressed, 0
            self._tell(Attempt(why="too many to tell one by one", suppressed=suppressed))
