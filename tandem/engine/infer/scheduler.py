"""What the next engine step computes: decoding, chunks of prompts, admission, preemption.

Owns: the running and the waiting requests and all their blocks. Refuses: tensors, clocks, randomness, I/O.
Invariants: accounts take turns (``shares``), requests of one account are served in order of arrival. The oldest
running request is never preempted, and an account whose turn it was but that found no room keeps its turn, so each of
them ends. A request that waits holds nothing, so admission cannot deadlock; a request is admitted only with blocks
for all its tokens, so a prompt that has begun ends. Keys and values of mixed versions never get into the prefix index.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.config.sections.engine import AtPublish
from tandem.core.types import FinishReason
from tandem.engine.infer.kv_cache import BlockManager, Found, chain_key, root_key
from tandem.engine.infer.request import NO_SEAT, Request
from tandem.engine.infer.seats import Seats
from tandem.engine.infer.shares import Account, Shares
from tandem.engine.infer.tier import Copy

QUANTUM = 256  # prompt tokens of one account in a step before others that have a prompt, too, get a turn


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
    """One step under ``version``: ``copies`` in their order, then a token of each request that decodes, then chunks of
    what was not computed yet. ``sampled`` get a token, in the order of the sampler's rows. ``ended`` were given up
    because weights were published: whoever runs the plan removes them."""

    version: int
    copies: list[Copy] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)

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

    def __init__(
        self,
        blocks: BlockManager,
        seats: Seats,
        *,
        max_step_tokens: int,
        prefix_cache: bool,
        at_publish: AtPublish = "keep",
    ) -> None:
        self.blocks = blocks
        self.seats = seats
        self.running: list[Request] = []  # both in order of arrival
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self._max_step_tokens = max_step_tokens
        self._prefix_cache = prefix_cache
        self._at_publish: AtPublish = at_publish
        self._shares = Shares()
        self._blocked: Account | None = None  # had its turn, and its first request found no room
        self._claims: dict[bytes, Request] = {}  # prefixes that a running request is computing
        self._version: int | None = None
        self._arrivals = 0

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return self.running + self.waiting

    def add(self, request: Request) -> None:
        """Put a request at the end of its line."""
        self._arrivals += 1
        request.order = self._arrivals
        self._shares.enter(request.account)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and take its blocks back. Others may use its prefix."""
        if request.seat == NO_SEAT:
            self.waiting.remove(request)
        else:
            self._unseat(request)
        self._shares.leave(request.account)

    def share(self, request: Request) -> None:
        """Let others go on from any token that this running request has now, also inside its last block."""
        if request.seat != NO_SEAT:
            self._index(request)
            self._index_tail(request)

    def plan(self, version: int) -> StepPlan:
        """Decide the next step. It is computed under ``version`` and ended by ``commit``, or by ``abandon``."""
        plan = StepPlan(version)
        if version != self._version:
            plan.ended = self._change_version(version)
        prefilling = self._plan_running(plan)
        budget = self._max_step_tokens - len(plan.decodes)
        if self.waiting:
            self._admit(prefilling, budget)
        self._prefill(prefilling, budget, plan)
        if not self.waiting and all(chunk.is_last for chunk in plan.chunks):
            self._shares.settle()
        plan.copies, self.blocks.copies = self.blocks.copies, []
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
            if chunk.is_last:
                self._index_tail(chunk.request)
                self._drop_claims(chunk.request)

    def abandon(self) -> None:
        """The planned step failed: what it should have written and copied is nowhere, so nothing is found any more."""
        self.blocks.forget()
        self.blocks.copies.clear()
        self._claims.clear()
        for request in self.running:
            request.clean = False

    # ---- running requests

    def _plan_running(self, plan: StepPlan) -> list[Request]:
        """Plan what decodes; returns what has a prompt left."""
        prefilling = []
        for request in list(self.running):
            if request.seat == NO_SEAT:  # preempted for an older one a moment ago
                continue
            if request.num_tokens - request.num_computed > 1:
                prefilling.append(request)
            elif len(request.blocks) * self.blocks.block_size >= request.num_tokens or self._grow(request):
                plan.decodes.append(request)
                self._shares.charge(request.account, 1)
        return [request for request in prefilling if request.seat != NO_SEAT]

    def _prefill(self, prefilling: list[Request], budget: int, plan: StepPlan) -> None:
        """Split the budget between the accounts; within one the oldest prompt goes first."""
        counts: dict[Request, int] = {}
        lines = _by_account(prefilling)
        while lines and budget > 0:
            account = self._shares.turn(lines)
            request = lines[account][0]
            left = request.num_tokens - request.num_computed - counts.get(request, 0)
            count = min(budget, left, QUANTUM if len(lines) > 1 else left)
            self._shares.charge(account, count)
            counts[request] = counts.get(request, 0) + count
            budget -= count
            if count == left:
                lines[account].popleft()
                if not lines[account]:
                    del lines[account]
        for request, count in counts.items():
            is_last = request.num_computed + count == request.num_tokens
            plan.chunks.append(Chunk(request, request.num_computed, count, is_last))

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
        """Back to the line, ahead of younger ones. What it has is kept, swapped or dropped as everything that nobody
        holds; what is not found later is computed again."""
        self._unseat(request)
        self.num_preemptions += 1
        insort(self.waiting, request, key=lambda other: other.order)

    def _unseat(self, request: Request) -> None:
        self.running.remove(request)
        self._index_tail(request)
        self._drop_claims(request)
        self.blocks.release(request.blocks)
        self.seats.leave(request)
        request.blocks = []
        request.num_computed = request.num_indexed = 0
        request.clean = True

    # ---- admission

    def _admit(self, prefilling: list[Request], budget: int) -> None:
        """Seat waiting requests while the step has tokens for them; they join ``prefilling``. Who has no prompt under
        way may sit down even if others' prompts would use the step up."""
        if budget <= 0 or not self._has_seat():
            return
        busy = {request.account for request in prefilling}
        left = sum(request.num_tokens - request.num_computed for request in prefilling)
        lines = _by_account(request for request in self.waiting if request.finish_reason is None)
        while lines and self._has_seat():
            account = self._blocked
            if account is None or account not in lines:
                account = self._shares.turn(lines)
            request = lines[account][0]
            if left >= budget and account in busy:
                if account == self._blocked:
                    return
                del lines[account]
                continue
            found = self._find(request)
            if found is not None and not self._seat(request, found):
                self._blocked = account
                return
            self._blocked = None
            lines[account].popleft()
            if not lines[account]:
                del lines[account]
            if found is not None:  # else a sibling computes the same prefix right now: cheaper to wait for it
                self.waiting.remove(request)
                prefilling.append(request)
                busy.add(account)
                left += request.num_tokens - request.num_computed

    def _has_seat(self) -> bool:
        # Never more running than a step has tokens: each of them advances in every step.
        return bool(self.seats.num_free) and len(self.running) < self._max_step_tokens

    def _seat(self, request: Request, found: Found) -> bool:
        # Leave each running request the block that it needs soon: an admission must not end in preemption.
        count, spare = self.blocks.blocks_for(request.num_tokens), len(self.running)
        blocks = self.blocks.seat(found, count, spare, request.tokens)
        if blocks is None:
            return False
        request.blocks = blocks
        request.num_indexed = len(found.places)
        request.num_computed = request.num_indexed * self.blocks.block_size + found.num_part
        if request.num_cached is None:
            request.num_cached = request.num_computed
        self.seats.take(request)
        insort(self.running, request, key=lambda other: other.order)
        if self._prefix_cache and request.num_computed < request.num_tokens - 1:
            for key in self._claimable(request)[request.num_indexed :]:
                self._claims.setdefault(key, request)
        return True

    # ---- prefixes

    def _find(self, request: Request) -> Found | None:
        """What of the request is computed; None while somebody computes what comes next. The last token is always
        computed: its hidden row is what the first new token is sampled from."""
        if not self._prefix_cache or request.prompt_logprobs is not None:  # every row of its prompt is wanted
            return Found()
        assert self._version is not None
        keys = self._claimable(request)
        full = (request.num_tokens - 1) // self.blocks.block_size
        found = self.blocks.find(root_key(self._version), keys[:full], request.tokens[: request.num_tokens - 1])
        place = len(found.places)
        missing = place * self.blocks.block_size + found.num_part < request.num_tokens - 1
        return None if missing and keys[place] in self._claims else found

    def _claimable(self, request: Request) -> list[bytes]:
        """Keys of all blocks of the request but its last token; the last one's may be that of a part of a block."""
        size = self.blocks.block_size
        full, part = divmod(request.num_tokens - 1, size)
        keys = self._chain(request, full)[:full]
        if part:
            keys.append(chain_key(self._parent(request, full), request.tokens[full * size : full * size + part]))
        return keys

    def _chain(self, request: Request, count: int) -> list[bytes]:
        """Keys of the request's first ``count`` blocks, or more."""
        if request.chain_version != self._version:
            request.chain, request.chain_version = [], self._version
        chain, size = request.chain, self.blocks.block_size
        while len(chain) < count:
            begin = len(chain) * size
            parent = self._parent(request, len(chain))
            chain.append(chain_key(parent, request.tokens[begin : begin + size]))
        return chain

    def _parent(self, request: Request, place: int) -> bytes:
        """What the block at ``place`` stands behind."""
        assert self._version is not None
        return request.chain[place - 1] if place else root_key(self._version)

    def _index(self, request: Request) -> None:
        """Let others use the blocks that have become full."""
        if not self._prefix_cache or not request.clean:
            return
        size = self.blocks.block_size
        full = request.num_computed // size
        keys = self._chain(request, full)
        for place in range(request.num_indexed, full):
            tokens = request.tokens[place * size : (place + 1) * size]
            self.blocks.register(request.blocks[place], self._parent(request, place), tokens, keys[place])
            self._claims.pop(keys[place], None)
        request.num_indexed = full

    def _index_tail(self, request: Request) -> None:
        """Let others use what it has in its last block, too, and go on from there in a copy."""
        full, part = divmod(request.num_computed, self.blocks.block_size)
        if not self._prefix_cache or not request.clean or not part:
            return
        self._chain(request, full)
        tokens = request.tokens[full * self.blocks.block_size : request.num_computed]
        self.blocks.register(request.blocks[full], self._parent(request, full), tokens)

    def _drop_claims(self, request: Request) -> None:
        for key in [key for key, owner in self._claims.items() if owner is request]:
            del self._claims[key]

    def _change_version(self, version: int) -> list[Request]:
        """What was computed is of the old weights: nobody else may use it, and whether requests in flight go on with
        it is ``at_publish``. Returns those that end."""
        self._version = version
        self.blocks.forget()
        self._claims.clear()
        for request in self.running:
            request.clean = False
        if self._at_publish == "keep":
            return []
        for request in list(self.running):
            self._unseat(request)
            insort(self.waiting, request, key=lambda other: other.order)
        if self._at_publish == "reprefill":
            return []
        ended = [request for request in self.waiting if request.num_tokens > request.num_given]
        for request in ended:
            request.finish_reason = FinishReason.ABORT
        return ended


def _by_account(requests: Iterable[Request]) -> dict[Account, deque[Request]]:
    """Requests in lines, each in the order that they come in."""
    lines: dict[Account, deque[Request]] = {}
    for request in requests:
        lines.setdefault(request.account, deque()).append(request)
    return lines
