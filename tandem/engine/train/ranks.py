"""The ranks of a run, as rank 0 sees them: processes of one machine, one for each device.

Owns: starting them, the line to each, noticing that one died or does not answer, and ending all. Refuses: what they
compute. Invariants: every wait for a rank has a deadline and ends with the name of who is missing; after a failure
the group is broken for good and says so at every use; ``close`` leaves no process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from multiprocessing.connection import Connection
from typing import IO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tandem.core.errors import ClusterError, EngineError
from tandem.engine.train.rank_messages import Answer, Command, Join, Ping, Pong
from tandem.engine.train.rank_worker import LOOPBACK, join

T = TypeVar("T")
START_S = 120.0  # a process reads its libraries, from a cold disk perhaps
PING_S = 2.0  # a rank whose listening thread does not answer within it is not running
END_S = 5.0
HINT = "resume the run: it goes on from its last checkpoint"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tandem.engine.train.rank_worker import main; main(int(sys.argv[2]))"
)


class _Rank:
    """One process and the line to it. ``died`` is done when the line has ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.died: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ponged = threading.Event()
        self.last_error = ""
        self._pending: deque[concurrent.futures.Future[Answer]] = deque()
        self._lock = threading.Lock()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
            )
        self._line = Connection(ours.detach())
        self._reader = threading.Thread(target=self._hear, name=f"tandem-rank-{number}", daemon=True)
        self._reader.start()

    def ask(self, command: Command) -> concurrent.futures.Future[Answer]:
        """Send a command; the answer comes into the future, which fails when the rank dies."""
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        with self._lock:
            if not isinstance(command, Ping):
                self._pending.append(answer)
            with contextlib.suppress(OSError):  # its end is told by the reader
                self._line.send(command)
        return answer

    def _hear(self) -> None:
        while True:
            try:
                said = self._line.recv()
            except (EOFError, OSError):
                break
            if isinstance(said, Pong):
                self.ponged.set()
                continue
            if said.fatal:
                self.last_error = said.error
            with self._lock:
                self._pending.popleft().set_result(said)
        self.died.set_result(None)

    def story(self) -> str:
        """How the process ended: by itself, a signal, and the last that it said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=PING_S)
        code = self.process.returncode
        how = "closed its line" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        with contextlib.suppress(ValueError, OSError):
            self._said.seek(max(0, self._said.seek(0, 2) - 2000))
            lines = self._said.read().decode(errors="replace").strip().splitlines()
            return f"rank {self.number} (process {self.process.pid}) {how}" + (f": {lines[-1]}" if lines else "")
        return f"rank {self.number} {how}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=END_S)
        self._line.close()
        self._said.close()


class RankGroup:
    """Ranks 1 and up as processes, this process as rank 0. ``num_ranks`` counts this one."""

    def __init__(self, num_ranks: int, *, device: str = "cpu", threads: int = 1, timeout_s: float = 600.0) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self._threads = threads
        self._broken = ""
        self._ranks: list[_Rank] = []
        self._bells: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()  # of those who wait now

    @property
    def processes(self) -> list[int]:
        """The process ids of the other ranks."""
        return [rank.process.pid for rank in self._ranks]

    def start(self) -> None:
        """Start the processes and meet them; blocks.

        Raises:
            ClusterError: a rank died, or was not there in time.
        """
        timeout = datetime.timedelta(seconds=self.timeout_s)
        store = TCPStore(LOOPBACK, 0, is_master=True, timeout=timeout, wait_for_workers=False)

        def command(rank: int) -> Join:
            return Join(
                port=store.port, rank=rank, num_ranks=self.num_ranks, device=self.device.type, threads=self._threads,
                timeout_s=self.timeout_s,
            )  # fmt: skip

        self._ranks = [_Rank(number) for number in range(1, self.num_ranks)]
        for rank in self._ranks:
            rank.died.add_done_callback(lambda _: self._ring())
        self._await_start()
        answers = [rank.ask(command(rank.number)) for rank in self._ranks]
        joining: concurrent.futures.Future[torch.device] = concurrent.futures.Future()

        def run() -> None:
            try:
                joining.set_result(join(command(0), store))
            except Exception as error:
                joining.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        waiting = [joining, *answers, *(rank.died for rank in self._ranks)]
        deadline = time.monotonic() + self.timeout_s
        while not (joining.done() and all(answer.done() for answer in answers)):
            left = max(0.0, deadline - time.monotonic())
            open_ones = [each for each in waiting if not each.done()]
            if not left or self._gone() or (joining.done() and joining.exception()):
                break
            concurrent.futures.wait(open_ones, timeout=left, return_when=concurrent.futures.FIRST_COMPLETED)
        if self._gone() or not joining.done() or joining.exception() or not all(answer.done() for answer in answers):
            cause = joining.exception() if joining.done() else None
            raise self.fail("the ranks could not meet", cause)
        self.device = joining.result()

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_S
        for rank in self._ranks:
            rank.ask(Ping())
        for rank in self._ranks:
            while not rank.ponged.wait(0.05) and not self._gone() and time.monotonic() < deadline:
                pass
            if not rank.ponged.is_set():
                raise self.fail(f"rank {rank.number} did not start within {START_S:g} s", None)

    def ask(self, commands: Sequence[Command]) -> list[concurrent.futures.Future[Answer]]:
        """Give each other rank its command.

        Raises:
            ClusterError: the group is broken.
        """
        if self._broken:
            raise ClusterError(self._broken, hint=HINT)
        return [rank.ask(command) for rank, command in zip(self._ranks, commands, strict=True)]

    async def together(
        self, what: str, own: Awaitable[T], answers: Sequence[concurrent.futures.Future[Answer]]
    ) -> tuple[T, list[Answer]]:
        """Wait for this rank's part and the others' answers, or the first failure among them.

        Raises:
            ClusterError: a rank died, failed or did not answer in time; the group is broken.
            EngineError: what all ranks came to alike.
        """
        bell = asyncio.Event()
        listener = (asyncio.get_running_loop(), bell)
        self._bells.add(listener)
        if self._gone():
            bell.set()
        part, death = asyncio.ensure_future(own), asyncio.ensure_future(bell.wait())
        others = asyncio.gather(*(asyncio.wrap_future(answer) for answer in answers))
        try:
            await asyncio.wait({part, death}, return_when=asyncio.FIRST_COMPLETED)
            if part.done() and not part.cancelled() and isinstance(part.exception(), EngineError):
                await asyncio.wait({others, death}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                if others.done() and all(answer.error and not answer.fatal for answer in others.result()):
                    raise part.exception() or AssertionError
            if not part.done() or part.cancelled() or part.exception():
                failed = part.exception() if part.done() and not part.cancelled() else None
                raise await asyncio.to_thread(self.fail, what, failed)
            await asyncio.wait({others, death}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not others.done() or any(answer.error for answer in others.result()):
                raise await asyncio.to_thread(self.fail, what, None)
            return part.result(), others.result()
        except asyncio.CancelledError:
            self._broken = f"{what} was cancelled; the ranks are out of step"
            raise
        finally:
            self._bells.discard(listener)
            for waiting in (part, death, others):
                waiting.cancel()
            await asyncio.gather(part, death, others, return_exceptions=True)

    def wait(self, what: str, answers: Sequence[concurrent.futures.Future[Answer]]) -> list[Answer]:
        """The same for a thread that has done its own part."""
        open_ones = [*answers, *(rank.died for rank in self._ranks)]
        deadline = time.monotonic() + self.timeout_s
        while not all(answer.done() for answer in answers) and not self._gone() and time.monotonic() < deadline:
            left = [each for each in open_ones if not each.done()]
            concurrent.futures.wait(left, deadline - time.monotonic(), concurrent.futures.FIRST_COMPLETED)
        if not all(answer.done() and not answer.result().error for answer in answers):
            raise self.fail(what, None)
        return [answer.result() for answer in answers]

    def _ring(self) -> None:
        for loop, bell in list(self._bells):
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(bell.set)

    def _gone(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.died.done()]

    def fail(self, what: str, cause: BaseException | None) -> ClusterError:
        """Find out who is to blame, end the others, and make the error that says so."""
        if self._broken:
            return ClusterError(self._broken, hint=HINT)
        told = [rank for rank in self._ranks if rank.last_error]
        if not told and not self._gone():  # perhaps the news of an end is still on its way
            for rank in self._ranks:
                rank.ponged.clear()
                rank.ask(Ping())
            deadline = time.monotonic() + PING_S
            for rank in self._ranks:
                while not rank.ponged.wait(0.01) and not rank.died.done() and time.monotonic() < deadline:
                    pass
        told = told or [rank for rank in self._ranks if rank.last_error]
        silent = [rank for rank in self._ranks if not rank.ponged.is_set() and not rank.died.done()]
        if told:
            reasons = [f"rank {rank.number}: {rank.last_error.splitlines()[0]}" for rank in told]
        elif gone := self._gone():
            reasons = [rank.story() for rank in gone]
        elif silent and self._ranks:
            names = ", ".join(f"rank {rank.number} (process {rank.process.pid})" for rank in silent)
            reasons = [f"{names} did not answer within {self.timeout_s:g} s"]
        elif cause is not None:
            reasons = [f"rank 0: {type(cause).__name__}: {cause}".splitlines()[0]]
        else:
            reasons = [f"some of {self.num_ranks} ranks still compute after {self.timeout_s:g} s"]
        self._broken = f"{what}: {'; '.join(reasons)}"
        for rank in self._ranks:
            rank.process.kill()
        return ClusterError(self._broken, hint=HINT)

    def close(self) -> None:
        """End every rank. What this process still waits for in an exchange fails with them."""
        self._broken = self._broken or "the ranks have ended"
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        if dist.is_initialized():
            dist.destroy_process_group()
