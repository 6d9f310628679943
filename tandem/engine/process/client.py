"""The caller's side: an engine in a process of its own, as a ``TokenEngine``.

Owns: the process, its socket, the two slots of its weights, the calls that wait. Refuses: models.
Invariants: a version is published when the other side has compared every tensor with what was sent and computes on
it, and only then is the slot of the version before it free; when the process ends, every call that waits fails with
``EngineLost``, and nothing of it is left: not the process, not its memory.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from tandem.core.errors import EngineError, EngineLost, TandemError
from tandem.core.protocols import TokenGuide
from tandem.core.types import Completion, EngineStats, GenerateRequest, Sampled, Top, WeightVersion, floats, ids
from tandem.engine.compute import ComputeQueue
from tandem.engine.process import messages as m
from tandem.engine.process.host import stats_of_nothing
from tandem.engine.process.program import Program, ended
from tandem.engine.transports.transport import Layout, Sender, digest_of, find_transport, layout_of
from tandem.engine.weights import PublishedWeights

START_S = 180.0
LOAD_S = 120.0


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Completion | None]
    on_tokens: Callable[[Sampled], None] | None = None
    guide: TokenGuide | None = None
    request_id: str = ""
    scored: m.Scored | None = None  # its prompt, until its first token comes


class ProcessEngine:
    """An inference engine elsewhere on this host (``core.protocols.TokenEngine``). Make it with ``started``."""

    def __init__(self, weights: PublishedWeights, compute: ComputeQueue, sender: Sender, layout: Layout) -> None:
        self._weights, self._compute, self._sender, self._layout = weights, compute, sender, layout
        self._slot, self._sent, self._is_asleep = 1, -1, False
        self._taking: asyncio.Task[None] | None = None  # a version on its way, whoever still waits for it
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
        weights.is_served_here = False
        layout = layout_of(tensors, weights.model.packable() if program.takes_packed else ())
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
        on_tokens: Callable[[Sampled], None] | None = None,
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

    async def fork(
        self,
        request_id: str,
        forks: Mapping[str, int],
        *,
        at: int | None = None,
        on_tokens: Callable[[str, Sampled], None] | None = None,
        guides: Mapping[str, TokenGuide] | None = None,
    ) -> list[Completion]:
        """Let a running request's answer go on in several ways (see ``TokenEngine``)."""
        guides = guides or {}
        if guides and guides.keys() != forks.keys():
            raise EngineError(f"request {request_id}: each fork of a guided request needs a guide of its own")
        futures = asyncio.get_running_loop().create_future
        numbers = [
            self._open(
                _Call(futures(), None if on_tokens is None else partial(on_tokens, name), guides.get(name), name)
            )
            for name in forks
        ]
        ways = tuple((number, name, seed) for number, (name, seed) in zip(numbers, forks.items(), strict=True))
        self._say(m.Fork(request_id=request_id, ways=ways, at=at, is_guided=bool(guides)))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(number)) for number in numbers]
        except BaseExceptionGroup as errors:  # the first failure ended the others
            raise errors.exceptions[0] from None
        made = [task.result() for task in tasks]
        return [completion for completion in made if completion is not None]

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
            await self._late()
            if self._weights.changes != self._sent:
                await self._publish()

    async def sleep(self) -> None:
        """Have it give back all memory that can be made again: KV cache, prepared weights, and the weights
        themselves, which come again with ``wake``, a version, or a request.

        Raises:
            EngineError: requests are in flight.
        """
        async with self._loading:
            await self._late()
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
        self._closing, self._taking = True, None
        if hasattr(self, "_writer"):
            self._writer.close()
            await asyncio.wait([self._listener])
        if hasattr(self, "_process"):
            await asyncio.to_thread(ended, self._process)
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

        async def taking() -> None:
            call = _Call(asyncio.get_running_loop().create_future())
            await self._run(call, lambda number: m.Load(call=number, version=placed, slot=slot, sums=sums_N8.tobytes()))
            self._slot, self._sent, self._is_asleep = slot, changes, False
            self.published = placed

        task = self._taking = asyncio.create_task(taking(), name="tandem-weights")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # also if nobody waits
        await self._answered(task, f"to take weights {version.number}")
        task.result()

    async def _late(self) -> None:
        """Wait for the answer to a version that was given up: the process may take it at any time, and until it has
        said whether it did, neither slot is free. A refusal was that version's: its slot is free again."""
        if self._taking is not None and not self._taking.done():
            await self._answered(self._taking, "whether it took the weights sent before")

    async def _answered(self, taking: asyncio.Task[None], what: str) -> None:
        """Wait for the end of the task, which goes on when nobody waits any more."""
        done, _ = await asyncio.wait({taking}, timeout=LOAD_S)
        if not done:
            raise self._silent(what)

    def _silent(self, what: str) -> EngineError:
        return EngineError(
            f"the engine's process {self._process.pid} did not answer within {LOAD_S:g} s when asked {what}",
            hint="an engine step takes long, or the machine swaps",
        )

    async def _asked(self, message: Callable[[int], object], what: str) -> None:
        call = _Call(asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait_for(self._run(call, message), LOAD_S)
        except TimeoutError as error:
            raise self._silent(what) from error

    # ---- the process
    async def _start(self, program: Program) -> None:
        self._process, ours = program.begun(self._sender.files)
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
        status = await asyncio.to_thread(ended, self._process)
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
        number = self._open(call)
        self._say(message(number))
        return await self._answer(number)

    def _open(self, call: _Call) -> int:
        if self.lost.done():
            raise EngineLost(self.lost.result().message, hint=self.lost.result().hint)
        if self._closing:
            raise EngineError("the engine is closed")
        self._last_call += 1
        number = self._last_call
        self._calls[number] = call
        return number

    async def _answer(self, number: int) -> Completion | None:
        try:
            return await self._calls[number].future
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
                tops = dict(message.tops)
                told = zip(message.calls, message.token_ids, message.logprobs, strict=True)
                for place, (number, token, logprob) in enumerate(told):
                    self._note(number, token, logprob, tops.get(place))
            case m.Scored() if message.call in self._calls:
                self._calls[message.call].scored = message
            case m.Done():
                self._stats = message.stats
                if (call := self._calls.get(message.call)) is not None and not call.future.done():
                    call.future.set_result(message.completion)
            case m.Failed():
                if (call := self._calls.get(message.call)) is not None and not call.future.done():
                    call.future.set_exception(message.error())
            case m.Ask():
                self._say(self._guided(message))

    def _note(self, number: int, token: int, logprob: float, top: Top | None) -> None:
        call = self._calls.get(number)
        if call is None or call.on_tokens is None or call.future.done():
            return
        scored, call.scored = call.scored, None
        new = Sampled(
            token_ids=ids([token]),
            logprobs=floats([logprob]),
            tops=None if top is None else (top,),
            prompt_logprobs=None if scored is None else scored.logprobs,
            prompt_tops=None if scored is None else scored.tops,
        )
        try:
            call.on_tokens(new)
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
