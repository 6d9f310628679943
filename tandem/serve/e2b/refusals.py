"""Calls that were let in by nobody, in the audit log: who tried what, bounded in number.

Owns: how many of them are told one by one; what comes beyond in a window of time is told as a number. Invariant: a call
is refused whether or not that can be recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.types import Scope

from tandem.core.errors import TandemError
from tandem.serve.e2b.faults import Fault

WINDOW_S = 60.0
MOST = 30  # of one window: a flood shall not fill the disk
REFUSALS = (401, 403)

log = logging.getLogger(__name__)


class Refusals:
    """``note(action, actor, **detail)`` writes a record; ``clock``: seconds."""

    def __init__(self, note: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._note = note
        self._clock = clock
        self._window = -WINDOW_S
        self._told, self._untold = 0, 0

    def tell(self, fault: Fault, scope: Scope) -> None:
        """Nothing, where the fault is no refusal. What was shown (keys, tokens, signatures) is not written down."""
        if fault.status not in REFUSALS:
            return
        if (now := self._clock()) - self._window >= WINDOW_S:
            self.close()
            self._window, self._told = now, 0
        if self._told >= MOST:
            self._untold += 1
            return
        self._told += 1
        client = scope.get("client")
        actor = f"nobody from {client[0] if client else 'nowhere'}"
        what = f"{scope.get('method', 'WEBSOCKET')} {scope['path']}"
        self._write(f"refused {what}"[:200], actor, why=fault.message)

    def close(self) -> None:
        """Tell how many were not told."""
        if self._untold:
            count, self._untold = self._untold, 0
            self._write("refused more calls", "nobody", count=str(count))

    def _write(self, action: str, actor: str, **detail: str) -> None:
        try:
            self._note(action, actor=actor, **detail)
        except TandemError as error:
            log.error("a refused call could not be recorded: %s", error.message)
