"""The engine's side: one engine that serves the process at the other end of a socket.

Owns: the calls in flight, the check of weights that arrive, and the end of the process: it ends with the connection.
Refuses: making engines (its caller does). Invariants: what is served is what was sent, compared byte for byte at each
version; new tokens of all requests of a step go out together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.core.protocols import TokenEngine
from tandem.core.types import Completion, EngineStats, GenerateRequest, Ids, Sampled, Top, WeightVersion, floats, ids
from tandem.engine.process import messages as m
from tandem.engine.transports.transport import check_arrival, find_transport

GUIDE_S = 30.0  # a guide's answer
MOST_TOKENS = 1 << 20  # no vocabulary is larger


class HostedEngine(TokenEngine, Protocol):
    """An engine whose weights come from elsewhere."""

    async def adopt(self, tensors: dict[str, Tensor], version: WeightVersion) -> None:
        """Compute on these tensors from the next step on. They stay as they are until the version after this one."""
        ...

    async def sleep(self) -> None:
        """Give memory back; the next version, or ``wake``, ends it."""
        ...

    async def wake(self) -> None: ...


_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Make = Callable[[m.Start], Awaitable[HostedEngine]]


def end_with_parent() -> bool:
    """Have the system end this process with the one that started it; False: that one has ended already."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    return os.getppid() == parent


async def host(file: int, make: Make) -> None:
    """Serve the socket ``file`` until its other end is closed."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=file))
    start = await m.read_message(reader)
    if not isinstance(start, m.Start):
        return
    try:
        engine = await make(start)
    except Exception as error:  # the boundary of the process: its caller hears of it
        writer.write(m.frame(m.failed(-1, error)))
        await writer.drain()
        return
    hosted = _Hosted(engine, start, writer)
    writer.write(m.frame(m.Ready()))
    try:
        while (message := await m.read_message(reader)) is not None:
            hosted.hear(message)
    finally:
        await hosted.close()
        writer.close()


class _Hosted:
    def __init__(self, engine: HostedEngine, start: m.Start, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._receiver = find_transport(start.transport).receiver(start.layout, start.files)
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._guides: dict[int, _DistantGuide] = {}
        self._fresh: list[tuple[int, int, float, Top | None]] = []  # (call, token and its numbers) since the last flush

    def hear(self, message: object) -> None:
        match message:
            case m.Generate():
                self._begin(message.call, partial(self._generate, message.call, message.request, message.is_guided))
            case m.Fork():
                for call, name, seed in message.ways:  # tasks of one turn of the loop: no step lies between them
                    self._begin(call, partial(self._fork, call, message, name, seed))
            case m.Cancel() if message.call in self._calls:
                if message.call in self._guides:
                    self._guides[message.call].answer(m.Mask(call=message.call, bits=b""))
                self._calls[message.call].cancel()
            case m.Abort():
                self._begin(-1, partial(self._engine.abort, message.request_id))
            case m.Load():
                self._begin(message.call, partial(self._load, message))
            case m.Sleep():
                self._begin(message.call, partial(self._plain, message.call, self._engine.sleep))
            case m.Wake():
                self._begin(message.call, partial(self._plain, message.call, self._engine.wake))
            case m.Mask() if message.call in self._guides:
                self._guides[message.call].answer(message)

    def say(self, message: object) -> None:
        if not self._writer.is_closing():
            self._writer.write(m.frame(message))

    async def close(self) -> None:
        for task in [*self._calls.values(), *self._aborts]:
            task.cancel()
        for guide in self._guides.values():
            guide.answer(m.Mask(call=-1, bits=b""))
        await self._engine.close()
        self._receiver.close()

    def _begin(self, call: int, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """``work`` is made by the task: one that is cancelled before it begins leaves nothing that nobody awaits."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # the boundary of the process: its caller hears of it
                if call >= 0:
                    self.say(m.failed(call, error))

        task = asyncio.ensure_future(guarded())
        if call >= 0:
            self._calls[call] = task
        else:
            self._aborts.add(task)
        # No ``finally`` in the task: one that never began has none.
        task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        self._calls.pop(call, None)
        if (guide := self._guides.pop(call, None)) is not None:
            guide.answer(m.Mask(call=call, bits=b""))  # a step may wait for it

    async def _plain(self, call: int, work: Callable[[], Coroutine[object, object, None]]) -> None:
        await work()
        self.say(m.Done(call=call, stats=self._engine.stats()))

    async def _generate(self, call: int, request: GenerateRequest, is_guided: bool) -> None:
        guide = self._guide(call, is_guided)
        completion = await self._engine.generate(request, on_tokens=lambda new: self._note(call, new), guide=guide)
        self._end(call, completion)

    async def _fork(self, call: int, message: m.Fork, name: str, seed: int) -> None:
        guide = self._guide(call, message.is_guided)
        (completion,) = await self._engine.fork(
            message.request_id,
            {name: seed},
            at=message.at,
            on_tokens=lambda _, new: self._note(call, new),
            guides=None if guide is None else {name: guide},
        )
        self._end(call, completion)

    def _guide(self, call: int, is_guided: bool) -> _DistantGuide | None:
        if not is_guided:
            return None
        guide = self._guides[call] = _DistantGuide(self, call)
        return guide

    def _end(self, call: int, completion: Completion) -> None:
        self._flush()
        self.say(m.Done(call=call, stats=self._engine.stats(), completion=completion))

    def _note(self, call: int, new: Sampled) -> None:
        if new.prompt_logprobs is not None:
            self.say(m.Scored(call=call, logprobs=new.prompt_logprobs, tops=new.prompt_tops))
        if not self._fresh:
            self._loop.call_soon(self._flush)  # after all requests of the step
        tops = new.tops or (None,) * len(new.token_ids)
        self._fresh += zip((call,) * len(tops), new.token_ids, new.logprobs, tops, strict=True)

    def _flush(self) -> None:
        if fresh := self._fresh:
            self._fresh = []
            calls, tokens, logprobs, tops = zip(*fresh, strict=True)
            self.say(
                m.Tokens(
                    calls=ids(calls),
                    token_ids=ids(tokens),
                    logprobs=floats(logprobs),
                    stats=self._engine.stats(),
                    tops=tuple((place, top) for place, top in enumerate(tops) if top is not None),
                )
            )

    async def _load(self, message: m.Load) -> None:
        sums_N8 = np.frombuffer(message.sums, np.uint64).reshape(-1, 8)

        def arrived() -> dict[str, Tensor]:
            tensors = self._receiver.receive(message.slot)
            check_arrival(tensors, sums_N8, version=message.version.number)
            return tensors

        await self._engine.adopt(await asyncio.to_thread(arrived), message.version)
        self.say(m.Done(call=message.call, stats=self._engine.stats()))


class _DistantGuide:
    """A guide that lives in the caller's process. The compute thread waits for its answers."""

    def __init__(self, hosted: _Hosted, call: int) -> None:
        self._hosted, self._call = hosted, call
        self._loop = asyncio.get_running_loop()
        self._since: Ids = ids()
        self._answer: concurrent.futures.Future[m.Mask] = concurrent.futures.Future()

    def allowed(self) -> np.ndarray:
        """A bool for each token id."""
        self._answer = concurrent.futures.Future()
        since, self._since = self._since, ids()
        self._loop.call_soon_threadsafe(self._hosted.say, m.Ask(call=self._call, token_ids=since))
        try:
            mask = self._answer.result(GUIDE_S)
        except TimeoutError as error:
            raise EngineError(f"the guide of call {self._call} did not answer within {GUIDE_S:g} s") from error
        if mask.problem:
            raise EngineError(f"the guide of call {self._call} failed: {mask.problem}")
        if not mask.bits:  # nobody waits for this answer any more; others of the step do for theirs
            return np.ones(MOST_TOKENS, bool)
        return np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little").astype(bool)

    def advance(self, token_id: int) -> None:
        self._since.append(token_id)

    def answer(self, mask: m.Mask) -> None:
        if not self._answer.done():
            self._answer.set_result(mask)


def stats_of_nothing(version: int = -1) -> EngineStats:
    """Counters of an engine that nobody has heard of yet."""
    return EngineStats(num_running=0, num_waiting=0, blocks_in_use=0, blocks_total=0, prompt_tokens=0,
                       cached_tokens=0, generated_tokens=0, busy_s=0.0, version=version)  # fmt: skip
