"""The inference engine: requests in, completions out, one engine step after the other.

Owns: the requests in flight, the counters, and the task that steps while there are any. Each step is one job on the
compute queue, which plans, computes and samples under one version of the weights.
Invariants: scheduler state changes inside a step, or on the event loop while no step runs; every request that came
in ends with a completion or an error, and gives its blocks back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.config.sections.engine import EngineSection
from tandem.core.errors import EngineError, PromptTooLong
from tandem.core.types import Completion, EngineStats, GenerateRequest, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.kv_cache import BlockManager
from tandem.engine.infer.request import Request
from tandem.engine.infer.runner import Runner
from tandem.engine.infer.scheduler import Scheduler, StepPlan
from tandem.engine.infer.seats import Seats
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM

log = logging.getLogger(__name__)
STALL_S = 60.0  # a step that has not come back after so long is named in the log


class _Flight:
    """A request in the engine and who waits for it."""

    __slots__ = ("ended", "future", "heard", "on_tokens", "request")

    def __init__(
        self, request: Request, future: asyncio.Future[Completion], on_tokens: Callable[[Sequence[int]], None] | None
    ) -> None:
        self.request = request
        self.future = future
        self.on_tokens = on_tokens
        self.heard = request.num_tokens
        self.ended = False  # aborted or cancelled: leaves at the next pause between steps


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that raised, and the requests that were in it."""

    requests: list[Request]
    error: Exception


class InferEngine:
    """Serves the live weights of this process (``core.protocols.TokenEngine``)."""

    def __init__(
        self,
        model: CausalLM,
        weights: PublishedWeights,
        section: EngineSection,
        compute: ComputeQueue,
        *,
        max_context_tokens: int,
        eos_ids: Sequence[int],
    ) -> None:
        infer = section.infer
        num_blocks = infer.kv_tokens // infer.block_size
        self._limit = min(max_context_tokens, num_blocks * infer.block_size, model.spec.max_positions)
        self._vocab_size = model.spec.vocab_size
        self._eos_ids = tuple(eos_ids)
        self._weights = weights
        self._compute = compute
        seats = Seats(infer.max_num_seqs, self._limit, infer.block_size)
        self._blocks = BlockManager(num_blocks, infer.block_size)
        self._scheduler = Scheduler(
            self._blocks, seats, max_step_tokens=infer.max_step_tokens, prefix_cache=infer.prefix_cache
        )
        self._runner = Runner(model, seats, num_blocks * infer.block_size)
        self._flights: dict[str, _Flight] = {}
        self._arrivals: list[_Flight] = []  # in flight, not yet with the scheduler
        self._pump: asyncio.Task[None] | None = None
        self._step_lock = threading.Lock()
        self._closed = False
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._busy_s = 0.0

    async def generate(
        self, request: GenerateRequest, *, on_tokens: Callable[[Sequence[int]], None] | None = None
    ) -> Completion:
        """Run one request to its end (see ``TokenEngine``)."""
        self._check(request)
        loop = asyncio.get_running_loop()
        flight = _Flight(Request(request, eos_ids=self._eos_ids), loop.create_future(), on_tokens)
        self._flights[request.id] = flight
        self._arrivals.append(flight)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run(), name="tandem-infer")
        try:
            return await flight.future
        except asyncio.CancelledError:
            flight.ended = True
            raise

    async def abort(self, request_id: str) -> None:
        """End a request now; it returns what it has."""
        if (flight := self._flights.get(request_id)) is not None:
            flight.ended = True

    async def load(self, version: WeightVersion) -> None:
        """Serve ``version``: it is an alias of the live weights, which every step reads, with their number."""
        if version.place != "alias":
            raise EngineError(f"weights {version.number} lie in {version.place}; this engine serves live weights only")
        if version.number > self._weights.version:
            raise EngineError(f"weights {version.number} are not there: the live ones are {self._weights.version}")

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._arrivals),
            blocks_in_use=self._blocks.num_used,
            blocks_total=self._blocks.num_blocks,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            busy_s=self._busy_s,
            version=self._weights.version,
        )

    async def close(self) -> None:
        """Fail what is in flight and take no more. Idempotent."""
        self._closed = True
        if self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])

    def _check(self, request: GenerateRequest) -> None:
        if self._closed:
            raise EngineError(f"request {request.id}: the engine is closed")
        if request.id in self._flights:
            raise EngineError(f"request {request.id} is in flight already")
        prompt, params = request.prompt_ids, request.params
        if not len(prompt) or params.max_tokens < 1:
            raise EngineError(
                f"request {request.id}: {len(prompt)} prompt tokens and max_tokens {params.max_tokens}; both must be 1 "
                "at least"
            )
        if len(prompt) + params.max_tokens > self._limit:
            raise PromptTooLong(
                f"request {request.id}: {len(prompt)} prompt tokens and {params.max_tokens} new ones are "
                f"{len(prompt) + params.max_tokens}, the engine holds {self._limit}",
                hint="shorten the prompt, lower max_tokens, raise model.max_context_tokens or engine.infer.kv_tokens",
            )
        ids = np.frombuffer(prompt, np.int32)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise EngineError(f"request {request.id}: prompt ids outside the vocabulary of {self._vocab_size}")

    async def _run(self) -> None:
        """Step until nothing is in flight."""
        try:
            while self._flights and not self._closed:
                self._take_in()
                if self._flights:
                    await self._one_step()
        finally:
            with self._step_lock:  # a step in the compute thread ends before its requests are taken from it
                reason = "the engine was closed" if self._closed else "the engine's loop ended"
                for flight in list(self._flights.values()):
                    self._leave(flight, EngineError(f"request {flight.request.id}: {reason}"))

    async def _one_step(self) -> None:
        job = asyncio.ensure_future(self._compute.run("infer", self._step))
        waited = 0.0
        while not (await asyncio.wait([job], timeout=STALL_S))[0]:
            waited += STALL_S
            log.warning(
                "an engine step is not back after %.0f s; in flight: %s", waited, ", ".join(sorted(self._flights))
            )
        try:
            outcome = job.result()
        except EngineError as error:  # the compute queue is closed: nothing will run any more
            outcome = _Failed([flight.request for flight in self._flights.values()], error)
        if isinstance(outcome, _Failed):
            self._fail(outcome)
        else:
            self._deliver(outcome)

    def _take_in(self) -> None:
        """Between steps: new requests go to the scheduler, ended ones leave it."""
        arrivals, self._arrivals = self._arrivals, []
        for flight in arrivals:
            self._scheduler.add(flight.request)
        for flight in [flight for flight in self._flights.values() if flight.ended]:
            self._leave(flight)

    def _deliver(self, plan: StepPlan) -> None:
        """After a step: stream its tokens, complete what is done."""
        for request in plan.sampled:
            flight = self._flights[request.id]
            if flight.on_tokens is not None and not flight.ended:
                fresh = request.tokens[flight.heard : request.num_tokens].tolist()
                flight.heard = request.num_tokens
                try:
                    flight.on_tokens(fresh)
                except Exception as error:  # foreign code: its request fails, the others go on
                    self._leave(flight, EngineError(f"request {request.id}: its listener raised {error!r}"))
                    continue
            if request.finish_reason is not None:
                self._leave(flight)

    def _fail(self, failed: _Failed) -> None:
        """A step failed: its requests end with the reason, the others go on."""
        cause = failed.error
        for request in failed.requests:
            if (flight := self._flights.get(request.id)) is not None:
                error = EngineError(f"request {request.id}: the engine step failed: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
                self._leave(flight, error)

    def _leave(self, flight: _Flight, error: EngineError | None = None) -> None:
        """Take a request out, give its blocks back, and tell its caller."""
        request = flight.request
        del self._flights[request.id]
        if flight in self._arrivals:
            self._arrivals.remove(flight)
        else:
            self._scheduler.remove(request)
        if flight.future.done():  # the caller was cancelled
            return
        if error is None:
            flight.future.set_result(request.completion())
        else:
            flight.future.set_exception(error)

    # ---- the compute thread's side

    def _step(self) -> StepPlan | _Failed:
        """Plan, compute and sample under one version of the weights."""
        with self._step_lock:
            started = time.perf_counter()
            plan: StepPlan | None = None
            try:
                plan = self._scheduler.plan(self._weights.version)
                if not plan:
                    raise EngineError("none of the waiting requests can go on")
                tokens_N, logprobs_N = self._runner.run(plan)
                self._scheduler.commit(plan)
            except Exception as error:  # a supervisor: the requests of the step end, the loop goes on
                return _Failed(plan.requests if plan else self._scheduler.requests, error)
            for request, token, logprob in zip(plan.sampled, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
                request.append(token, logprob, plan.version)
            self._count(plan, started)
            return plan

    def _count(self, plan: StepPlan, started: float) -> None:
        now = time.perf_counter()
        for chunk in plan.chunks:
            if (request := chunk.request).started_s is None:
                request.started_s = started
                self._prompt_tokens += request.num_prompt
                self._cached_tokens += request.num_cached or 0
        self._generated_tokens += len(plan.sampled)
        self._busy_s += now - started
