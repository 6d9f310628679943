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

from tandem.core.protocols import TokenGuide
from tandem.core.types import Completion, FinishReason, GenerateRequest, Top

NO_SEAT = -1


class Request:
    """State of one generation."""

    __slots__ = (
        "arrived_s", "blocks", "chain", "chain_version", "clean", "finish_reason", "guide", "id", "logprobs",
        "num_cached", "num_computed", "num_indexed", "num_prompt", "num_tokens", "order", "params", "prompt_logprobs",
        "prompt_tops", "seat", "seed", "started_s", "stops", "tokens", "tops", "versions",
    )  # fmt: skip

    def __init__(
        self, request: GenerateRequest, *, eos_ids: Collection[int] = (), guide: TokenGuide | None = None
    ) -> None:
        prompt, params = request.prompt_ids, request.params
        self.id = request.id
        self.params = params
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

    def completion(self) -> Completion:
        """What the caller gets: everything sampled so far."""
        now = time.perf_counter()
        count = self.num_generated
        scored = self.prompt_logprobs
        if scored is not None and np.isnan(scored).any():  # aborted before its prompt was computed
            scored = None
        with_tops = scored is not None and self.params.top_logprobs > 0
        return Completion(
            request_id=self.id,
            token_ids=array("i", self.tokens[self.num_prompt : self.num_tokens].tobytes()),
            logprobs=array("f", self.logprobs[:count].tobytes()),
            versions=array("i", self.versions[:count].tobytes()),
            finish_reason=self.finish_reason or FinishReason.ABORT,
            num_cached_tokens=self.num_cached or 0,
            queue_s=(self.started_s or now) - self.arrived_s,
            total_s=now - self.arrived_s,
            tops=tuple(self.tops) if self.params.top_logprobs else None,
            prompt_logprobs=None if scored is None else array("f", scored.tobytes()),
            prompt_tops=tuple(self.prompt_tops[place] for place in range(1, self.num_prompt)) if with_tops else None,
        )
