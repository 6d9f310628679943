"""Commands of a box as whole calls, for backends without long-lived processes.

Owns: a command as one call: its output streams, its deadline kills all of it. Refuses, by name: standard input,
signals, terminals, other users.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.sandbox.backend import Call, Outcome, Piece, Start, Terminal
from tandem.sandbox.session import Session

NO_END_S = 86_400.0
KEPT_BYTES = 2**20
_numbers = itertools.count(2**21)  # no pid of the box can be that large: nobody mistakes one for the other


class CalledProcess:
    """A backend ``Process`` that is one call."""

    def __init__(self, session: Session, start: Start) -> None:
        if start.terminal is not None:
            raise _refused("a terminal")
        if start.stdin:
            raise _refused("standard input of a running command")
        _own(start.user)
        self.pid = next(_numbers)
        self._kept: list[Piece] = []
        self._kept_bytes = 0
        self._news = asyncio.Condition()
        self._calling = asyncio.ensure_future(session.call(Call(
            arguments=list(start.arguments), folder=start.folder, environment=start.environment,
            timeout_s=start.timeout_s or NO_END_S, stdout_cap_bytes=KEPT_BYTES, stderr_cap_bytes=KEPT_BYTES,
            on_stdout=lambda data: self._hear("stdout", data), on_stderr=lambda data: self._hear("stderr", data),
        )))  # fmt: skip
        self._calling.add_done_callback(lambda _: self._tell())

    async def output(self, *, from_start: bool = False) -> AsyncIterator[Piece]:
        place = 0 if from_start else len(self._kept)
        while True:
            while place < len(self._kept):
                yield self._kept[place]
                place += 1
            if self._calling.done():
                self._calling.result()
                return
            async with self._news:
                if place >= len(self._kept) and not self._calling.done():
                    await self._news.wait()

    async def wait(self) -> Outcome:
        outcome = await asyncio.shield(self._calling)
        if not outcome.started and not outcome.timed_out:
            raise SandboxError(f"the command did not start: {outcome.stderr.decode('utf-8', 'replace').strip()}")
        return outcome

    async def send_stdin(self, data: bytes) -> None:
        raise _refused("standard input of a running command")

    async def close_stdin(self) -> None:
        raise _refused("standard input of a running command")

    async def resize(self, terminal: Terminal) -> None:
        raise _refused("a terminal")

    async def signal(self, number: int) -> None:
        raise _refused("signals to a running command")

    def _hear(self, stream: str, data: bytes) -> None:
        self._kept.append(Piece(stream, data))
        self._tell()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        asyncio.ensure_future(tell())


def _own(user: str) -> None:
    if user != "agent":
        raise _refused(f"user {user}")


def _refused(what: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"{what}: this sandbox's backend runs whole commands only")
