"""What the next engine step computes: decoding, chunks of prompts, admission, preemption.

Owns: the running and the waiting requests and all their blocks. Refuses: tensors, clocks, randomness, I/O.
Invariants: requests are served in order of arrival, and the oldest one is never preempted, so each of them ends; a
request that waits holds nothing, so admission cannot deadlock; a request is admitted only with blocks for all its
tokens, so a prompt that has begun ends; keys and values of mixed versions never get into the prefix index.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from tandem.engine.infer.kv_cache import BlockManager, chain_key, root_key
from tandem.engine.infer.request import NO_SEAT, Request
from tandem.engine.infer.seats import Seats


@dataclass(slots=True)
class Chunk:
    """Tokens ``start .. start + count`` of a request, computed in one step. ``is_last``: nothing is left to compute
    behind them, so the last one's row is sampled from."""

    request: Request
    start: int
    count: int
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """One step under ``version``: a token of each request that decodes, then chunks of what was not computed yet.
    ``sampled`` get a token, in the order of the sampler's rows."""

    version: int
    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        return self.decodes + [chunk.request for chunk in self.chunks]

    @property
    def sampled(self) -> list[Request]:
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.is_last]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


class Scheduler:
    """Continuous batching under a token budget."""

    def __init__(self, blocks: BlockManager, seats: Seats, *, max_step_tokens: int, prefix_cache: bool) -> None:
        self.blocks = blocks
        self.seats = seats
        self.running: list[Request] = []  # both in order of arrival
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self._max_step_tokens = max_step_tokens
        self._prefix_cache = prefix_cache
        self._claims: dict[bytes, Request] = {}  # prefixes that a running request is computing
        self._version: int | None = None
        self._arrivals = 0

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return self.running + self.waiting

    def add(self, request: Request) -> None:
        """Put a request at the end of the line."""
        self._arrivals += 1
        request.order = self._arrivals
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and take its blocks back. Others may use its prefix."""
        if request.seat == NO_SEAT:
            self.waiting.remove(request)
        else:
            self._unseat(request)

    def plan(self, version: int) -> StepPlan:
        """Decide the next step. It is computed under ``version`` and ended by ``commit``."""
        if version != self._version:
            self._change_version(version)
        plan = StepPlan(version)
        self._plan_running(plan)
        if self.waiting:
            self._admit(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step was computed: its keys and values are in the cache."""
        size = self.blocks.block_size
        for request in plan.decodes:
            request.num_computed += 1
            if not request.num_computed % size:
                self._index(request)
        for chunk in plan.chunks:
            chunk.request.num_computed += chunk.count
            self._index(chunk.request)

    def _plan_running(self, plan: StepPlan) -> None:
        prefilling = []
        for request in list(self.running):
            if request.seat == NO_SEAT:  # preempted for an older one a moment ago
                continue
            if request.num_tokens - request.num_computed > 1:
                prefilling.append(request)
            elif len(request.blocks) * self.blocks.block_size >= request.num_tokens or self._grow(request):
                plan.decodes.append(request)
        budget = self._max_step_tokens - len(plan.decodes)
        for request in prefilling:
            if request.seat != NO_SEAT and budget:
                budget -= self._prefill(request, budget, plan)

    def _prefill(self, request: Request, budget: int, plan: StepPlan) -> int:
        left = request.num_tokens - request.num_computed
        count = min(budget, left)
        plan.chunks.append(Chunk(request, request.num_computed, count, count == left))
        return count

    def _grow(self, request: Request) -> bool:
        """Get a block for the next token, at the cost of the youngest requests if need be; False when the youngest
        is this one."""
        while (fresh := self.blocks.allocate(1)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self.seats.extend(request, len(request.blocks), fresh)
        request.blocks += fresh
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the line, ahead of younger ones; everything it has is computed again."""
        self._unseat(request)
        self.num_preemptions += 1
        insort(self.waiting, request, key=lambda other: other.order)

    def _unseat(self, request: Request) -> None:
        self.running.remove(request)
        self._drop_claims(request)
        self.blocks.release(request.blocks)
        self.seats.leave(request)
        request.blocks = []
        request.num_computed = request.num_indexed = 0
        request.clean = True

    def _admit(self, plan: StepPlan) -> None:
        budget = self._max_step_tokens - len(plan.decodes) - sum(chunk.count for chunk in plan.chunks)
        place = 0
        while place < len(self.waiting) and budget > 0 and self._has_seat():
            request = self.waiting[place]
            hit = self._match(request)
            if hit is None:  # a sibling computes the same prefix right now: cheaper to wait for it
                place += 1
                continue
            if not self._seat(request, hit):
                return
            del self.waiting[place]
            budget -= self._prefill(request, budget, plan)

    def _has_seat(self) -> bool:
        # Never more running than a step has tokens: each of them advances in every step.
        return bool(self.seats.num_free) and len(self.running) < self._max_step_tokens

    def _seat(self, request: Request, hit: list[int]) -> bool:
        blocks = self.blocks
        need = blocks.blocks_for(request.num_tokens) - len(hit)
        # Leave each running request the block that it needs soon: an admission must not end in preemption.
        spare = len(self.running)
        if blocks.num_free - blocks.num_idle(hit) < need + spare:
            return False
        blocks.hold(hit)
        fresh = blocks.allocate(need)
        assert fresh is not None
        request.blocks = hit + fresh
        request.num_computed = len(hit) * blocks.block_size
        request.num_indexed = len(hit)
        if request.num_cached is None:
            request.num_cached = request.num_computed
        self.seats.take(request)
        insort(self.running, request, key=lambda other: other.order)
        if self._prefix_cache:
            for key in request.chain[len(hit) :]:
                self._claims.setdefault(key, request)
        return True

    def _match(self, request: Request) -> list[int] | None:
        """Blocks with the request's prefix; None while somebody computes the block that comes next. The last token
        is always computed: its hidden row is what the first new token is sampled from."""
        if not self._prefix_cache or request.prompt_logprobs is not None:  # every row of its prompt is wanted
            return []
        keys = self._chain(request, (request.num_tokens - 1) // self.blocks.block_size)
        hit = self.blocks.match(keys)
        if len(hit) < len(keys) and keys[len(hit)] in self._claims:
            return None
        return hit

    def _chain(self, request: Request, count: int) -> list[bytes]:
        """Keys of the request's first ``count`` blocks."""
        assert self._version is not None
        if request.chain_version != self._version:
            request.chain, request.chain_version = [], self._version
        chain, size = request.chain, self.blocks.block_size
        while len(chain) < count:
            parent = chain[-1] if chain else root_key(self._version)
            begin = len(chain) * size
            chain.append(chain_key(parent, request.tokens[begin : begin + size]))
        return chain[:count]

    def _index(self, request: Request) -> None:
        """Let others use the blocks that have become full."""
        if not self._prefix_cache or not request.clean:
            return
        full = request.num_computed // self.blocks.block_size
        keys = self._chain(request, full)
        for place in range(request.num_indexed, full):
            self.blocks.register(request.blocks[place], keys[place])
            self._claims.pop(keys[place], None)
        request.num_indexed = full

    def _drop_claims(self, request: Request) -> None:
        if self._claims:
            for key in request.chain[request.num_indexed :]:
                if self._claims.get(key) is request:
                    del self._claims[key]

    def _change_version(self, version: int) -> None:
        """Requests in flight keep their keys and values and go on; nobody else may use those."""
        self._version = version
        self.blocks.forget()
        self._claims.clear()
        for request in self.running:
            request.clean = False
