"""Reward functions in processes that can be killed.

Owns: worker processes, their start, their deadline, their replacement. A worker is started when first needed,
serves one call at a time, and is ended with everything it started when a call passes its limit; the guard above it
(``reward_guard``) sees to that, and does the same when this process dies.
Refuses: judging the answer (``reward`` does). Invariants: the limit is counted from the moment a warm worker has
the call, so neither a queue nor an import eats a good sample's time; ``close`` leaves no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

import msgspec

from tandem.core import wire
from tandem.core.errors import RewardError
from tandem.core.protocols import Sandbox
from tandem.core.types import Episode, Task
from tandem.envs.reward_box import BoxRequest, serve

START_S = 60.0
END_S = 2.0  # for the guard to find all that a worker started
MAX_FRAME_BYTES = 256 * 2**20


class RewardTimeout(RewardError):
    """A reward function passed its limit."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to a worker: where modules are found, and what to import before it says it is ready."""

    path: list[str]
    preload: list[str]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """``box`` is the id of the episode's box, if there is one."""

    reference: str
    episode: bytes
    task: bytes
    box: str | None


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """``error`` says what the function raised (or answered, if it was no number); else ``value``."""

    value: float | None = None
    error: str | None = None


class _Worker:
    """One worker with its two pipes; ``process`` is the guard above it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.dead = False

    @classmethod
    async def start(cls, preload: Sequence[str]) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem.envs.reward_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, limit=2**20,
        )  # fmt: skip
        worker = cls(process)
        try:
            async with asyncio.timeout(START_S):
                await worker.send(msgspec.msgpack.encode(Greeting(path=sys.path, preload=list(preload))))
                await worker.receive()
        except BaseException as error:
            await worker.kill()
            if isinstance(error, (TimeoutError, OSError, EOFError)):
                raise RewardError(f"a reward process did not start: {type(error).__name__}: {error}") from error
            raise
        return worker

    async def send(self, frame: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(len(frame).to_bytes(4, "little") + frame)
        await self.process.stdin.drain()

    async def receive(self) -> bytes:
        assert self.process.stdout is not None
        size = int.from_bytes(await self.process.stdout.readexactly(4), "little")
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return await self.process.stdout.readexactly(size)

    async def kill(self) -> None:
        """End the process and whatever it started. Idempotent."""
        if not self.dead:
            self.dead = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


async def _hear_out(worker: _Worker, box: Sandbox | None) -> Answer:
    """Serve what the function asks of the box until it answers."""
    while True:
        said = msgspec.msgpack.decode(await worker.receive(), type=Answer | BoxRequest)
        if isinstance(said, Answer):
            return said
        if box is None:
            raise EOFError("a request for a box that is not there")
        await worker.send(msgspec.msgpack.encode(await serve(said, box)))


class RewardPool:
    """At most ``size`` worker processes. ``preload`` names functions whose modules a worker imports at start."""

    def __init__(self, *, size: int = 2, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._free = asyncio.Semaphore(size)
        self._size = size
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_killed = 0

    def warm(self) -> None:
        """Start all workers in the background, so that the first calls find them ready."""
        for _ in range(self._size - len(self._idle) - len(self._busy) - len(self._starting)):
            self._replace()

    async def call(
        self, reference: str, episode: Episode, task: Task, *, time_s: float, box: Sandbox | None = None
    ) -> float | None:
        """Call the function ``reference`` with what it takes of ``episode``, ``task`` and ``box``.

        Raises:
            RewardTimeout: it did not answer in time; its process is gone.
            RewardError: it raised, answered no number, took its process down, or could not be imported.
            SandboxError: the box failed under it.
        """
        request = Call(
            reference=reference,
            episode=wire.encode(episode),
            task=wire.encode(task),
            box=None if box is None else box.id,
        )
        async with self._free:
            if self._closed:
                raise RewardError("the reward pool is closed")
            worker = await self._take()
            self._busy.add(worker)
            healthy = False
            try:
                async with asyncio.timeout(time_s):
                    await worker.send(msgspec.msgpack.encode(request))
                    answer = await _hear_out(worker, box)
                healthy = True
            except TimeoutError as error:
                raise RewardTimeout(f"no answer within {time_s:g} s") from error
            except (OSError, EOFError, msgspec.DecodeError) as error:
                await worker.kill()
                raise RewardError(f"its process died (exit code {worker.process.returncode})") from error
            finally:
                self._busy.discard(worker)
                if healthy:
                    self._idle.append(worker)
                else:
                    await self._discard(worker)
        if answer.error is not None:
            raise RewardError(answer.error)
        return answer.value

    async def close(self) -> None:
        """Kill all workers and wait until they are gone."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        await asyncio.gather(*(worker.kill() for worker in workers))

    async def _take(self) -> _Worker:
        while self._starting and not self._idle:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        return self._idle.pop() if self._idle else await _Worker.start(self._preload)

    async def _discard(self, worker: _Worker) -> None:
        self.num_killed += 1
        await worker.kill()
        if not self._closed:
            self._replace()

    def _replace(self) -> None:
        async def start() -> None:
            try:
                worker = await _Worker.start(self._preload)
            except RewardError:
                return  # the next call starts one itself and reports why it cannot
            self._idle.append(worker)

        task = asyncio.create_task(start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
