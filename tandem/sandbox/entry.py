"""One box as its manager holds it: its record, its session, and whose turn it is.

Owns: the order of the moves of one box (one at a time, kill excepted), and that a record is written before its state
is seen. Invariant: what ``session.state`` shows is in the table, or the box is on its way out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from tandem.core.boxes import SandboxState
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable
from tandem.sandbox.backend import Box
from tandem.sandbox.lifecycle import ENDING
from tandem.sandbox.network.budget import Budget
from tandem.sandbox.records import BoxRecord, LogLine, now
from tandem.sandbox.session import Session
from tandem.sandbox.table import Table

TURN_TIMEOUT_S = 60.0
LOG_LINES = 1000
HOSTNAME_CHARACTERS = 63


class Entry:
    def __init__(self, record: BoxRecord, session: Session, table: Table) -> None:
        self.record = record
        self.session = session
        self.log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self.budget = Budget(record.network_bytes, lambda used: self.change(network_bytes=used))
        self.timer: asyncio.TimerHandle | None = None
        self._num_children = 0
        self._table = table
        self._turn = asyncio.Lock()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> SandboxState:
        return self.session.state

    @property
    def ending(self) -> bool:
        return self.state in ENDING

    @property
    def box(self) -> Box:
        """Raises SandboxUnavailable when only its files exist."""
        if self.session.box is None:
            what = f"sandbox {self.id} is paused with its files only: no process of it exists"
            raise SandboxUnavailable(what, hint="resume it first")
        return self.session.box

    def child_hostname(self) -> str:
        """A host name that no child before had. It counts, so that a run that is repeated has the same ones."""
        self._num_children += 1
        number = f"-{self._num_children}"
        return self.record.spec.hostname[: HOSTNAME_CHARACTERS - len(number)] + number

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the moves before this one.

        Raises:
            SandboxGone: it is ending. SandboxTimeout: the move before does not end.
        """
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise SandboxTimeout(
                f"sandbox {self.id} is still {self.state} after {TURN_TIMEOUT_S:g} s", hint="kill it if it hangs"
            ) from error
        try:
            if self.ending:
                raise SandboxGone(f"sandbox {self.id} is {self.state}", hint="create a new one")
            yield
        finally:
            self._turn.release()

    def move(self, to: SandboxState, **changes: object) -> None:
        """Compare and set: written first, then seen.

        Raises:
            SandboxGone: it was killed meanwhile. SandboxError: not allowed, or it cannot be written.
        """
        self.session.lifecycle.check(to)
        self._write(state=to, **changes)
        self.session.lifecycle.move(to)

    def settle(self, to: SandboxState) -> None:
        """A move that must not fail, of a box whose physical state is there already: what the table then says of it
        is an unfinished move, which a later process undoes to the same state."""
        self.session.lifecycle.check(to)
        try:
            self._write(state=to, intent="")
        except SandboxError as error:
            self.say("error", f"its state {to} could not be recorded: {error.message}")
        self.session.lifecycle.move(to)

    def change(self, **changes: object) -> None:
        """Of anything but the state."""
        self._write(**changes)

    def begin_kill(self) -> None:
        """From every state, whatever can be written."""
        self.settle(SandboxState.KILLING)

    def forget(self) -> None:
        """It is dead: no later process shall look for it."""
        self.stop_timer()
        try:
            self._table.remove(self.id)
        except SandboxError as error:  # a later process finds the row, not the box, and removes it
            self.say("error", f"its end could not be recorded: {error.message}")

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def say(self, level: str, message: str, **fields: str) -> None:
        self.log.append(LogLine(time=now(), level=level, message=message, fields=fields))

    def _write(self, **changes: object) -> None:
        record = msgspec.structs.replace(self.record, version=self.record.version + 1, **changes)
        self._table.replace(record)
        self.record = record
