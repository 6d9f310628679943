"""One request inside the engine: its tokens, its place in the cache, how far it is.

Owns: the mutable state of a request between its arrival and its completion. Refuses: tensors, decisions.
Invariants: ``num_computed`` tokens have keys and values in the cache, always fewer than ``num_tokens``; the
streams of the answer have one index. Buffers have their final size from the start, so nothing grows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection

import numpy as np

from tandem.core.errors import EngineError
from tandem.core.protocols import TokenGuide
from tandem.core.routes import Routes
from tandem.core.types import Completion, FinishReason, Floats, GenerateRequest, Sampled, Top
from tandem.engine.infer.shares import Account

NO_SEAT = -1


class Request:
    """State of one generation."""

    __slots__ = (
        "account", "arrived_s", "asked", "blocks", "chain", "chain_version", "clean", "finish_reason", "guide", "id",
        "logprobs", "num_cached", "num_computed", "num_given", "num_indexed", "num_prompt", "num_tokens", "order",
        "params", "prompt_logprobs", "prompt_tops", "seat", "seed", "started_s", "stops", "tokens", "tops", "versions",
    )  # fmt: skip

    def __init__(
        self, request: GenerateRequest, *, eos_ids: Collection[int] = (), guide: TokenGuide | None = None
    ) -> None:
        """With ``request.so_far`` it goes on behind that answer, as if it had sampled it itself.

        Raises:
            EngineError: there is nothing left to sample, or a report that was asked for is missing in it.
        """
        prompt, params = request.prompt_ids, request.params
        self.asked = request
        self.id = request.id
        self.params = params
        self.account = Account(request.group, request.priority)
        self.seed = request.seed
        self.stops = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + params.max_tokens, np.int32)
        self.tokens[: len(prompt)] = np.frombuffer(prompt, np.int32)
        self.logprobs = np.empty(params.max_tokens, np.float32)
        self.versions = np.empty(params.max_tokens, np.int32)
        self.guide = guide
        self.tops: list[Top] = []
        self.prompt_logprobs = np.full(len(prompt) - 1, np.nan, np.float32) if params.prompt_logprobs else None
        self.prompt_tops: dict[int, Top] = {}  # by the place of the token
        self.order = 0  # arrival; the scheduler numbers it
        self.seat = NO_SEAT
        self.blocks: list[int] = []
        self.chain: list[bytes] = []  # keys of its full blocks from the start, as far as anybody asked
        self.chain_version: int | None = None  # what they were made under
        self.clean = True  # all its blocks were written under one version
        self.num_computed = 0
        self.num_indexed = 0  # full blocks that the prefix index was told of
        self.num_cached: int | None = None  # prompt tokens that the first admission found computed
        self.finish_reason: FinishReason | None = None
        self.arrived_s = time.perf_counter()
        self.started_s: float | None = None
        if request.so_far is not None:
            self._inherit(request.so_far)
        self.num_given = self.num_tokens  # prompt and the answer so far

    def _inherit(self, so_far: Completion) -> None:
        given = so_far.token_ids
        if len(given) >= self.params.max_tokens or self.stops.intersection(given):
            raise EngineError(
                f"request {self.id}: nothing can follow the {len(given)} tokens of the answer so far: it ends there, "
                f"or max_tokens, {self.params.max_tokens}, is reached"
            )
        tops = so_far.tops or (None,) * len(given)
        if self.params.top_logprobs and None in tops:
            raise EngineError(f"request {self.id}: it asks for top log-probabilities, the answer so far has none")
        for token, logprob, version, top in zip(given, so_far.logprobs, so_far.versions, tops, strict=True):
            self.append(token, logprob, version, top if self.params.top_logprobs else None)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    def append(self, token: int, logprob: float, version: int, top: Top | None = None) -> None:
        """Add a sampled token, and end the request if this was its last one."""
        index = self.num_tokens - self.num_prompt
        self.tokens[self.num_tokens] = token
        self.logprobs[index] = logprob
        self.versions[index] = version
        self.num_tokens += 1
        if top is not None:
            self.tops.append(top)
        if self.guide is not None:
            self.guide.advance(token)
        if token in self.stops:
            self.finish_reason = FinishReason.STOP
        elif index + 1 == self.params.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def newest(self) -> Sampled:
        """The token that was appended last."""
        index = self.num_generated - 1
        scored, scored_tops = self._prompt_scores() if self.num_tokens == self.num_given + 1 else (None, None)
        return Sampled(
            token_ids=array("i", [int(self.tokens[self.num_tokens - 1])]),
            logprobs=array("f", [float(self.logprobs[index])]),
            tops=(self.tops[index],) if self.params.top_logprobs else None,
            prompt_logprobs=scored,
            prompt_tops=scored_tops,
        )

    def _prompt_scores(self) -> tuple[Floats | None, tuple[Top, ...] | None]:
        scored = self.prompt_logprobs
        if scored is None or np.isnan(scored).any():  # aborted before its prompt was computed
            return None, None
        values = array("f", scored.tobytes())
        if not self.params.top_logprobs:
            return values, None
        return values, tuple(self.prompt_tops[place] for place in range(1, self.num_prompt))

    def completion(self, count: int | None = None, routes: Routes | None = None) -> Completion:
        """What the caller gets: everything sampled so far, or the first ``count`` tokens of it."""
        now = time.perf_counter()
        whole = count is None
        count = self.num_generated if count is None else count
        scored, scored_tops = self._prompt_scores()
        return Completion(
            request_id=self.id,
            token_ids=array("i", self.tokens[self.num_prompt : self.num_prompt + count].tobytes()),
            logprobs=array("f", self.logprobs[:count].tobytes()),
            versions=array("i", self.versions[:count].tobytes()),
            finish_reason=(self.finish_reason if whole else None) or FinishReason.ABORT,
            num_cached_tokens=self.num_cached or 0,
            queue_s=(self.started_s or now) - self.arrived_s,
            total_s=now - self.arrived_s,
            tops=tuple(self.tops[:count]) if self.params.top_logprobs else None,
            prompt_logprobs=scored,
            prompt_tops=scored_tops,
            routes=routes,
        )
