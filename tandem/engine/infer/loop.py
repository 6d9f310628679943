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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tandem.config.sections.engine import EngineSection
from tandem.core.errors import EngineError, NotRunning, PromptTooLong
from tandem.core.protocols import TokenGuide
from tandem.core.types import Completion, EngineStats, GenerateRequest, Sampled, WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.kv_cache import BlockManager
from tandem.engine.infer.request import Request
from tandem.engine.infer.runner import Runner
from tandem.engine.infer.scheduler import Scheduler, StepPlan
from tandem.engine.infer.seats import Seats
from tandem.engine.infer.shares import MOST_PRIORITY
from tandem.engine.infer.tier import Costs, Move, Tier
from tandem.engine.memory import return_freed_memory
from tandem.engine.weights import PublishedWeights
from tandem.models.causal_lm import CausalLM

log = logging.getLogger(__name__)
STALL_S = 60.0  # a step that has not come back after so long is named in the log


class _Flight:
    """A request in the engine and who waits for it."""

    __slots__ = ("future", "on_tokens", "request")

    def __init__(
        self, request: Request, future: asyncio.Future[Completion], on_tokens: Callable[[Sampled], None] | None
    ) -> None:
        self.request = request
        self.future = future
        self.on_tokens = on_tokens


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
        num_outside = infer.swap_tokens // infer.block_size
        self._costs = Costs(infer.block_size)
        tier = Tier(num_outside, self._costs) if num_outside else None
        self._blocks = BlockManager(num_blocks, infer.block_size, tier)
        self._scheduler = Scheduler(
            self._blocks,
            seats,
            max_step_tokens=infer.max_step_tokens,
            prefix_cache=infer.prefix_cache,
            at_publish=infer.at_publish,
        )
        records = infer.record_routes and model.spec.experts is not None
        self._runner = Runner(model, seats, num_blocks, infer.block_size, num_outside, record_routes=records)
        if num_outside:
            self._costs.copied(1, self._runner.block_copy_s())
        self._flights: dict[Request, _Flight] = {}
        self._by_id: dict[str, Request] = {}  # those that may be aborted
        self._arrivals: list[Request] = []  # in flight, not yet with the scheduler
        self._forked: list[Request] = []  # others go on from their last token: tell the scheduler between two steps
        self._ended: list[Request] = []  # aborted, cancelled or given up: leave between two steps
        self._pump: asyncio.Task[None] | None = None
        self._ticket: object = None  # of the pump whose steps count: a late job of a cancelled one does nothing
        self._lock = threading.Lock()  # over the scheduler: a step has it, or the event loop between two steps
        self._closed = False
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._computed_tokens = 0
        self._busy_s = 0.0

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sampled], None] | None = None,
        guide: TokenGuide | None = None,
    ) -> Completion:
        """Run one request to its end (see ``TokenEngine``)."""
        self._check(request)
        loop = asyncio.get_running_loop()
        flight = _Flight(Request(request, eos_ids=self._eos_ids, guide=guide), loop.create_future(), on_tokens)
        self._flights[flight.request] = flight
        self._by_id[request.id] = flight.request
        self._arrivals.append(flight.request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run(), name="tandem-infer")
        try:
            return await flight.future
        except asyncio.CancelledError:
            self._end(flight.request)
            raise

    async def fork(
        self,
        request_id: str,
        forks: Mapping[str, int],
        *,
        at: int | None = None,
        on_tokens: Callable[[str, Sampled], None] | None = None,
        guides: Mapping[str, TokenGuide] | None = None,
    ) -> list[Completion]:
        """Let a running request's answer go on in several ways (see ``TokenEngine``). A fork holds no room before it
        is admitted; without the prefix cache it computes everything itself."""
        parent = self._by_id.get(request_id)
        if parent is None:
            raise NotRunning(f"request {request_id} is not running, so it cannot be forked")
        has = parent.num_generated
        at = has if at is None else at
        if not 0 <= at <= has:
            raise EngineError(f"request {request_id} has {has} tokens of its answer; it cannot be forked at {at}")
        guides = guides or {}
        if guides.keys() != (set() if parent.guide is None else forks.keys()):
            raise EngineError(f"request {request_id}: each fork of a guided request needs a guide of its own")
        begun = parent.completion(at)
        self._forked.append(parent)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self.generate(
                            replace(parent.asked, id=name, seed=seed, so_far=begun),
                            on_tokens=None if on_tokens is None else partial(on_tokens, name),
                            guide=guides.get(name),
                        )
                    )
                    for name, seed in forks.items()
                ]
        except BaseExceptionGroup as errors:  # the first failure ended the others
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def abort(self, request_id: str) -> None:
        """End a request now; it returns what it has."""
        if (request := self._by_id.get(request_id)) is not None:
            self._end(request)

    async def load(self, version: WeightVersion) -> None:
        """Serve ``version``: it is an alias of the live weights, which every step reads, with their number."""
        if version.place != "alias":
            raise EngineError(f"weights {version.number} lie in {version.place}; this engine serves live weights only")
        if version.number > self._weights.version:
            raise EngineError(f"weights {version.number} are not there: the live ones are {self._weights.version}")

    async def sleep(self) -> None:
        """Give the memory of KV cache and prepared weights back to the system; the next request wakes the engine.

        Raises:
            EngineError: requests are in flight.
        """
        await self._compute.run("infer", self._rest)

    async def wake(self) -> None:
        """Take the memory again now."""
        await self._compute.run("infer", self._runner.wake)

    def _rest(self) -> None:
        with self._lock:
            if self._flights:
                names = ", ".join(sorted(request.id for request in self._flights)[:5])
                raise EngineError(f"{len(self._flights)} requests are in flight: {names}",
                                  hint="wait for them or abort them, then let the engine sleep")  # fmt: skip
            self._blocks.forget()
            self._runner.sleep()
        return_freed_memory()

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
            computed_tokens=self._computed_tokens,
            preemptions=self._scheduler.num_preemptions,
            swapped_blocks=None if (tier := self._blocks.tier) is None else tier.num_out,
            returned_blocks=None if tier is None else tier.num_in,
        )

    async def close(self) -> None:
        """Fail what is in flight and take no more. Idempotent."""
        self._closed = True
        if self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])

    def _check(self, request: GenerateRequest) -> None:
        if self._closed:
            raise EngineError(f"request {request.id}: the engine is closed")
        if request.id in self._by_id:
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
        if bad := [token for token, _ in params.logit_bias if not 0 <= token < self._vocab_size]:
            raise EngineError(f"request {request.id}: logit_bias for id {bad[0]} outside the vocabulary")
        if abs(request.priority) > MOST_PRIORITY:
            raise EngineError(f"request {request.id}: priority {request.priority} is beyond {MOST_PRIORITY} either way")
        begun = request.so_far.token_ids if request.so_far is not None else ()
        for what, given in (("prompt", prompt), ("so_far", begun)):
            ids = np.asarray(given, np.int32)
            if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
                raise EngineError(f"request {request.id}: {what} ids outside the vocabulary of {self._vocab_size}")

    # ---- the event loop's side

    def _end(self, request: Request) -> None:
        """Let a request leave: at once if no step knows it, else at the next pause. Its name is free at once."""
        if request in self._arrivals:
            self._leave(request)
        elif self._by_id.get(request.id) is request:
            del self._by_id[request.id]
            self._ended.append(request)

    async def _run(self) -> None:
        """Step until nothing is in flight."""
        ticket = self._ticket = object()
        try:
            while self._flights and not self._closed:
                with self._lock:
                    self._take_in()
                if self._flights:
                    outcome = await self._one_step(ticket)
                    with self._lock:
                        if isinstance(outcome, _Failed):
                            self._fail(outcome)
                        else:
                            self._deliver(outcome)
        finally:
            with self._lock:  # a step in the compute thread ends before its requests are taken from it
                self._ticket = None
                reason = "the engine was closed" if self._closed else "the engine's loop ended"
                for request in list(self._flights):
                    self._leave(request, EngineError(f"request {request.id}: {reason}"))
                self._ended.clear()

    async def _one_step(self, ticket: object) -> StepPlan | _Failed:
        job = asyncio.ensure_future(self._compute.run("infer", lambda: self._step(ticket)))
        waited = 0.0
        while not (await asyncio.wait([job], timeout=STALL_S))[0]:
            waited += STALL_S
            names = ", ".join(sorted(request.id for request in self._flights))
            log.warning("no engine step came back for %.0f s (the compute thread is busy?): %s wait", waited, names)
        try:
            return job.result()
        except EngineError as error:  # the compute queue is closed: nothing will run any more
            return _Failed(list(self._flights), error)

    def _take_in(self) -> None:
        """Between steps: ended requests leave, new ones go to the scheduler."""
        ended, self._ended = self._ended, []
        for request in ended:
            if request in self._flights:
                self._leave(request)
        forked, self._forked = self._forked, []
        for request in forked:
            if request in self._flights:
                self._scheduler.share(request)
        arrivals, self._arrivals = self._arrivals, []
        for request in arrivals:
            self._scheduler.add(request)

    def _deliver(self, plan: StepPlan) -> None:
        """After a step: stream its tokens, complete what is done."""
        for request in plan.sampled:
            flight = self._flights[request]
            if flight.on_tokens is not None and not flight.future.done():
                try:
                    flight.on_tokens(request.newest())
                except Exception as error:  # foreign code: its request fails, the others go on
                    self._leave(request, EngineError(f"request {request.id}: its listener raised {error!r}"))
                    continue
            if request.finish_reason is not None:
                self._leave(request)

    def _fail(self, failed: _Failed) -> None:
        """A step failed: its requests end with the reason, the others go on."""
        cause = failed.error
        log.error("an engine step failed", exc_info=cause)
        for request in failed.requests:
            error = EngineError(f"request {request.id}: the engine step failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._leave(request, error)

    def _leave(self, request: Request, error: EngineError | None = None) -> None:
        """Take a request out, give its blocks back, and tell its caller."""
        flight = self._flights.pop(request)
        if self._by_id.get(request.id) is request:
            del self._by_id[request.id]
        routes = self._runner.routes(request) if error is None else None
        if request in self._arrivals:
            self._arrivals.remove(request)
        else:
            self._scheduler.remove(request)
        if flight.future.done():  # the caller was cancelled
            return
        if error is None:
            flight.future.set_result(request.completion(routes=routes))
        else:
            flight.future.set_exception(error)

    # ---- the compute thread's side

    def _step(self, ticket: object) -> StepPlan | _Failed:
        """Plan, compute and sample under one version of the weights."""
        with self._lock:
            if ticket is not self._ticket:
                return _Failed([], EngineError("nobody waits for this step"))
            started = time.perf_counter()
            plan: StepPlan | None = None
            try:
                plan = self._scheduler.plan(self._weights.version)
                self._ended += plan.ended
                if plan.ended and not plan:
                    return plan
                if not plan:
                    raise EngineError("none of the waiting requests can go on")
                copying_s = self._runner.move(plan.copies)
                drawn = self._runner.run(plan)
                self._scheduler.commit(plan)
            except Exception as error:  # a supervisor: the requests of the step end, the loop goes on
                self._scheduler.abandon()
                return _Failed(plan.requests if plan else self._scheduler.requests, error)
            drawn_N = zip(plan.sampled, drawn.tokens, drawn.logprobs, drawn.tops, strict=True)
            for request, token, logprob, top in drawn_N:
                request.append(token, logprob, plan.version, top)
            self._count(plan, started, copying_s)
            return plan

    def _count(self, plan: StepPlan, started: float, copying_s: float) -> None:
        now = time.perf_counter()
        num_prefilled = sum(chunk.count for chunk in plan.chunks)
        num_copied = sum(copy.move is not Move.WITHIN for copy in plan.copies)
        if num_prefilled > len(plan.decodes):  # what a token costs beside others, not alone in a step of its own
            self._costs.computed(num_prefilled + len(plan.decodes), now - started - copying_s)
        if num_copied:
            self._costs.copied(num_copied, copying_s)
        self._computed_tokens += num_prefilled + len(plan.decodes)
        for chunk in plan.chunks:
            if (request := chunk.request).started_s is None:
                request.started_s = started
                self._prompt_tokens += request.num_given
                self._cached_tokens += request.num_cached or 0
        self._generated_tokens += len(plan.sampled)
        self._busy_s += now - started
