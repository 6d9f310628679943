"""The caller's side: an engine in a process of its own, as a ``TokenEngine``.

Owns: the process, its socket, the two slots of its weights, the calls that wait. Refuses: models.
Invariants: a version is published when the other side has compared every tensor with what was sent and computes on
it, and only then is the slot of the version before it free; when the process ends, every call that waits fails with
``EngineLost``, and nothing of it is left: not the process, not its memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from tandem.core.errors import EngineError, EngineLost, TandemError
from tandem.core.protocols import TokenGuide
from tandem.core.types import Completion, EngineStats, GenerateRequest, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.process import messages as m
from tandem.engine.process.host import stats_of_nothing
from tandem.engine.transports.transport import Layout, Sender, digest_of, find_transport, layout_of
from tandem.engine.weights import PublishedWeights

START_S = 180.0
LOAD_S = 120.0
END_S = 5.0
PACKAGE = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What runs in the other process: a command that takes the number of its socket as its last word."""

    command: tuple[str, ...]
    settings: str  # JSON for the program
    transport: str = "shared_memory"
    names: tuple[tuple[str, str, int, int], ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Completion | None]
    on_tokens: Callable[[Sequence[int]], None] | None = None
    guide: TokenGuide | None = None
    request_id: str = ""


class ProcessEngine:
    """An inference engine elsewhere on this host (``core.protocols.TokenEngine``). Make it with ``started``."""

    def __init__(self, weights: PublishedWeights, compute: ComputeQueue, sender: Sender, layout: Layout) -> None:
        self._weights, self._compute, self._sender, self._layout = weights, compute, sender, layout
        self._slot, self._sent, self._is_asleep = 1, -1, False
        self.published = weights.current
        self._loading = asyncio.Lock()
        self._calls: dict[int, _Call] = {}
        self._last_call = 0
        self._stats = stats_of_nothing()
        self._closing = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[EngineLost] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes]
        self._writer: asyncio.StreamWriter
        self._listener: asyncio.Task[None]

    @classmethod
    async def started(cls, program: Program, weights: PublishedWeights, compute: ComputeQueue) -> ProcessEngine:
        """Start the program and publish the live weights to it.

        Raises:
            EngineError: it does not start within ``START_S``, or says why it cannot.
        """
        tensors: dict[str, Tensor] = dict(weights.model.named_parameters()) | dict(weights.model.named_buffers())
        layout = layout_of(tensors)
        sender = find_transport(program.transport).sender(layout, tensors)
        engine = cls(weights, compute, sender, layout)
        try:
            await engine._start(program)
            await engine.load(weights.current)
        except BaseException:
            await engine.close()
            raise
        return engine

    # ---- the protocol
    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        guide: TokenGuide | None = None,
    ) -> Completion:
        """Run one request to its end (see ``TokenEngine``)."""
        if self._is_asleep:
            await self.wake()
        call = _Call(asyncio.get_running_loop().create_future(), on_tokens, guide, request.id)
        completion = await self._run(
            call, lambda number: m.Generate(call=number, request=request, is_guided=guide is not None)
        )
        assert completion is not None
        return completion

    async def abort(self, request_id: str) -> None:
        """End a request now; it returns what it has."""
        if not self._closing and not self.lost.done():
            self._say(m.Abort(request_id=request_id))

    async def load(self, version: WeightVersion) -> None:
        """Move the live weights over, if they have changed, and serve them under their number.

        Raises:
            EngineLost: the process ended. EngineError: they did not arrive whole, or not within ``LOAD_S``.
        """
        async with self._loading:
            if self._weights.changes == self._sent:
                return
            await self._publish()

    async def sleep(self) -> None:
        """Have it give back all memory that can be made again: KV cache, prepared weights, and the weights
        themselves, which come again with ``wake``, a version, or a request.

        Raises:
            EngineError: requests are in flight.
        """
        async with self._loading:
            await self._asked(lambda number: m.Sleep(call=number), "to sleep")
            await asyncio.to_thread(self._sender.release)
            self._is_asleep, self._sent = True, -1

    async def wake(self) -> None:
        """Publish the live weights again and make the KV cache."""
        await self.load(self._weights.current)
        await self._asked(lambda number: m.Wake(call=number), "to wake")

    def stats(self) -> EngineStats:
        """Counters since the start, as the process told them last."""
        known = self._stats.num_running + self._stats.num_waiting
        generating = sum(bool(call.request_id) for call in self._calls.values())
        return replace(self._stats, num_waiting=self._stats.num_waiting + max(0, generating - known))

    async def close(self) -> None:
        """End the process and give its memory back. Idempotent."""
        self._closing = True
        if hasattr(self, "_writer"):
            self._writer.close()
            await asyncio.wait([self._listener])
        if hasattr(self, "_process"):
            await asyncio.to_thread(self._end)
        self._sender.close()

    @property
    def process_id(self) -> int:
        return self._process.pid

    # ---- publishing
    async def _publish(self) -> None:
        slot = 1 - self._slot

        def send() -> tuple[np.ndarray, WeightVersion, int]:
            return self._sender.send(slot), self._weights.current, self._weights.changes

        sums_N8, version, changes = await self._compute.run("train", send)
        placed = replace(version, digest=digest_of(self._layout, sums_N8), place=f"slot {slot}")
        await self._asked(
            lambda number: m.Load(call=number, version=placed, slot=slot, sums=sums_N8.tobytes()),
            f"to take weights {version.number}",
        )
        self._slot, self._sent, self._is_asleep = slot, changes, False
        self.published = placed

    async def _asked(self, message: Callable[[int], object], what: str) -> None:
        call = _Call(asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait_for(self._run(call, message), LOAD_S)
        except TimeoutError as error:
            pid = self._process.pid
            raise EngineError(f"the engine's process {pid} did not answer within {LOAD_S:g} s when asked {what}",
                              hint="an engine step takes long, or the machine swaps") from error  # fmt: skip

    # ---- the process
    async def _start(self, program: Program) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*program.command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *self._sender.files),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends that one
                env=_environment(program),
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine's process cannot be started: {error}") from error
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._listener = asyncio.create_task(self._listen(reader), name="tandem-engine-process")
        self._say(m.Start(settings=program.settings, transport=program.transport, layout=self._layout,
                          files=self._sender.files, names=program.names))  # fmt: skip
        done, _ = await asyncio.wait({self._ready, self.lost}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if self.lost in done:
            raise self.lost.result()
        if not done:
            raise EngineError(f"the engine's process {self._process.pid} was not ready within {START_S:g} s")
        self._ready.result()

    def _end(self) -> int:
        """Reap the process, by force after a while; returns its exit status. Blocks."""
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        problem = ""
        try:
            while (message := await m.read_message(reader)) is not None:
                self._hear(message)
        except TandemError as error:
            problem = f" (it sent what nobody understands: {error})"
        if self._closing:
            self._fail_all(lambda: EngineError("the engine was closed"))
            return
        self._writer.close()
        status = await asyncio.to_thread(self._end)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        waiting = len(self._calls)
        lost = EngineLost(
            f"the engine's process {self._process.pid} {how}{problem} while it served weights {self._stats.version}; "
            f"{waiting} call{'' if waiting == 1 else 's'} waited",
            hint="its last words are in this process's error output; the kernel kills what uses up the memory",
        )
        self._fail_all(lambda: EngineLost(lost.message, hint=lost.hint))
        self.lost.set_result(lost)

    def _fail_all(self, error: Callable[[], EngineError]) -> None:
        """Fail every call that waits, each with an error of its own: a raised one gathers its traceback."""
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(error())

    # ---- messages
    async def _run(self, call: _Call, message: Callable[[int], object]) -> Completion | None:
        if self.lost.done():
            raise EngineLost(self.lost.result().message, hint=self.lost.result().hint)
        if self._closing:
            raise EngineError("the engine is closed")
        self._last_call += 1
        number = self._last_call
        self._calls[number] = call
        self._say(message(number))
        try:
            return await call.future
        except asyncio.CancelledError:
            if not self._writer.is_closing():
                self._say(m.Cancel(call=number))
            raise
        finally:
            del self._calls[number]

    def _say(self, message: object) -> None:
        self._writer.write(m.frame(message))

    def _hear(self, message: object) -> None:
        match message:
            case m.Ready() if not self._ready.done():
                self._ready.set_result(None)
            case m.Failed(call=-1) if not self._ready.done():
                self._ready.set_exception(message.error())
            case m.Tokens():
                self._stats = message.stats
                for number, token in zip(message.calls, message.token_ids, strict=True):
                    self._note(number, token)
            case m.Done():
                self._stats = message.stats
                if (call := self._calls.get(message.call)) is not None and not call.future.done():
                    call.future.set_result(message.completion)
            case m.Failed():
                if (call := self._calls.get(message.call)) is not None and not call.future.done():
                    call.future.set_exception(message.error())
            case m.Ask():
                self._say(self._guided(message))

    def _note(self, number: int, token: int) -> None:
        call = self._calls.get(number)
        if call is None or call.on_tokens is None or call.future.done():
            return
        try:
            call.on_tokens([token])
        except Exception as error:  # foreign code: its request fails, the others go on
            call.future.set_exception(EngineError(f"request {call.request_id}: its listener raised {error!r}"))
            self._say(m.Cancel(call=number))

    def _guided(self, asked: m.Ask) -> m.Mask:
        call = self._calls.get(asked.call)
        if call is None or call.guide is None:
            return m.Mask(call=asked.call, bits=b"")
        try:
            for token in asked.token_ids:
                call.guide.advance(token)
            flags = np.asarray(call.guide.allowed(), dtype=bool)
            return m.Mask(call=asked.call, bits=np.packbits(flags, bitorder="little").tobytes())
        except Exception as error:  # foreign code: its request fails
            return m.Mask(call=asked.call, bits=b"", problem=f"{type(error).__name__}: {error}")


@asynccontextmanager
async def ending_with(engine: ProcessEngine) -> AsyncIterator[None]:
    """Cancel the work inside when the engine's process ends: nothing of it can go on.

    Raises:
        EngineLost: in place of that cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    is_inside, was_cancelled = True, False

    def end(_: object) -> None:
        nonlocal was_cancelled
        if is_inside:
            was_cancelled = True
            task.cancel()

    engine.lost.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if was_cancelled and task.uncancel() == 0:
            raise engine.lost.result() from None
        raise
    finally:
        is_inside = False


def _environment(program: Program) -> dict[str, str]:
    """This process's, in which the other one finds this package whatever interpreter it has."""
    made = {**os.environ, **(program.environment or {})}
    before = made.get("PYTHONPATH")
    return made | {"PYTHONPATH": f"{PACKAGE}{os.pathsep}{before}" if before else str(PACKAGE)}
