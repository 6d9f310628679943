"""When a box's time is up: it is paused or killed, whatever it does.

Owns: the timers, one a box. Invariant: a box that cannot be paused at its deadline ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import SandboxError
from tandem.core.events import SandboxFailed
from tandem.core.protocols import EventSink
from tandem.sandbox.births import Note
from tandem.sandbox.entry import Entry
from tandem.sandbox.records import OnTimeout, PauseMode, now
from tandem.sandbox.transitions import Transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """``own`` keeps work that nobody waits for until it ends."""

    transitions: Transitions
    sink: EventSink
    note: Note
    own: Callable[[Coroutine[Any, Any, None]], object]

    def watch(self, entry: Entry) -> None:
        """From now on, by what its record says now."""
        entry.stop_timer()
        if entry.record.deadline is not None and not entry.ending:
            delay_s = max(0.0, entry.record.deadline - now())
            entry.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        if entry.record.on_timeout is OnTimeout.PAUSE:
            self.note("pause", entry.id, "deadline")
            self.own(self._pause(entry))
            return
        self.note("kill", entry.id, "deadline")
        self.sink.emit(SandboxFailed(
            sandbox_id=entry.id, error="lifetime", detail=f"older than {entry.record.lifetime_s:g} s"
        ))
        self.own(entry.session.kill())

    async def _pause(self, entry: Entry) -> None:
        try:
            await self.transitions.pause(entry, PauseMode.WARM)
        except SandboxError as error:  # it must not run past its deadline
            entry.say("error", f"killed at its deadline, because it cannot be paused: {error.message}")
            await entry.session.kill()
