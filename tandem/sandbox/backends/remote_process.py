"""A long-lived command of a box at an E2B-compatible service.

Owns: the SDK's handle of it. What is kept of its output, and its listeners, are as for every backend's processes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.backend import Outcome, Start, Terminal
from tandem.sandbox.backends.process import SIGNALS, NamespaceProcess
from tandem.sandbox.backends.remote_errors import remote_errors


class RemoteProcess(NamespaceProcess):
    """Made before its command runs, because output may come before the handle does."""

    def __init__(self, start: Start, gone: Callable[[], SandboxGone]) -> None:
        super().__init__(0, start, lambda _: None, gone)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handle: Any = None
        self._commands: Any = None
        self._lost: Callable[[str], None] = lambda why: None
        self._following: asyncio.Task[None] | None = None
        self._deadline_s = start.timeout_s

    def follow(
        self,
        handle: Any,
        commands: Any,
        watched: Callable[[Any], Awaitable[int]],
        within: Callable[[float], AbstractAsyncContextManager[None]],
        lost: Callable[[str], None],
    ) -> None:
        """It runs: hear of its end. ``within`` is a deadline in the box's running time."""
        self._handle, self._commands, self._lost = handle, commands, lost
        self.on_started(handle.pid)
        self._following = asyncio.ensure_future(self._follow(watched, within))

    async def _follow(
        self, watched: Callable[[Any], Awaitable[int]], within: Callable[[float], AbstractAsyncContextManager[None]]
    ) -> None:
        code: int | None = None
        started = asyncio.get_running_loop().time()
        try:
            with remote_errors(f"process {self.pid}", lost=self._lost):
                try:
                    async with within(self._deadline_s) if self._deadline_s else nullcontext():
                        code = await watched(self._handle)
                except TimeoutError:
                    await self._handle.kill()
        except SandboxError:
            self.on_gone()
        else:
            self.on_end(Outcome(
                code=code, stdout=b"", stderr=b"", dropped_bytes=self._dropped, timed_out=code is None, started=True,
                oom_killed=False, duration_s=asyncio.get_running_loop().time() - started,
            ))  # fmt: skip
        finally:
            if not self.over.done():
                self.over.set_result(None)

    def on_text(self, stream: str, text: str) -> None:
        self.on_output(stream, text.encode("utf-8", "surrogateescape"))

    async def send_stdin(self, data: bytes) -> None:
        async with self._writing:
            self._require_input()
            with remote_errors(f"process {self.pid}: its stdin", lost=self._lost):
                await self._commands.send_stdin(self.pid, data)

    async def close_stdin(self) -> None:
        async with self._writing:
            if self._input_open and not self.ended:
                self._input_open = False
                with remote_errors(f"process {self.pid}: its stdin", lost=self._lost):
                    await self._commands.close_stdin(self.pid)

    async def resize(self, terminal: Terminal) -> None:
        raise SandboxError(f"process {self.pid} has no terminal")

    async def signal(self, number: int) -> None:
        if number not in SIGNALS:
            raise ValueError(f"no signal {number}")
        if self.ended:
            return
        with remote_errors(f"process {self.pid}: signal {number}", lost=self._lost):
            if number == signal.SIGKILL:
                await self._handle.kill()
            else:
                await self._commands.run(f"kill -{number} -- -{self.pid} 2>/dev/null || kill -{number} {self.pid} || :")
