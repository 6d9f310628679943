"""Runs a plan: packed tensors in, tokens out.

Owns: the KV cache's tensors and the conversion of a plan. Refuses: decisions, the version of the weights.
Invariants: one forward pass a step, whatever it mixes; one conversion of host arrays to tensors a step. On the CPU
the key index is the seats' own array, not a copy of it; elsewhere the lists of the step's requests are moved with it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch

from tandem.core.routes import Routes, missing
from tandem.core.types import Top
from tandem.engine.infer.mover import Mover
from tandem.engine.infer.request import NO_SEAT, Request
from tandem.engine.infer.sampler import Draws, largest, likeliest, sample
from tandem.engine.infer.scheduler import Chunk, StepPlan
from tandem.engine.infer.seats import Seats
from tandem.engine.infer.shaping import is_shaped, shape
from tandem.engine.infer.tier import Copy
from tandem.kernels.functions import HEAD_CHUNK, row_logprobs
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext, KVCache
from tandem.models.causal_lm import CausalLM
from tandem.models.routes import RouteLog


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, one entry for each of ``plan.sampled``."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[Top | None]


class Runner:
    """A model with a KV cache."""

    def __init__(
        self,
        model: CausalLM,
        seats: Seats,
        num_blocks: int,
        block_size: int,
        num_outside: int = 0,
        *,
        record_routes: bool = False,
    ) -> None:
        """A pool of ``num_blocks``, and room for ``num_outside`` more in CPU memory. ``record_routes``: keep each
        token's experts beside its keys and values."""
        self._record_routes = record_routes
        self._model = model
        self._seats = seats
        self._num_blocks, self._block_size, self._num_outside = num_blocks, block_size, num_outside
        self._cache, self._mover = self._make()
        self._is_asleep = False
        self._room_MV: torch.Tensor | None = None  # the logits of a step: with a large vocabulary tens of megabytes
        self._slots_L = torch.from_numpy(seats.slots_MN.reshape(-1))

    def _make(self) -> tuple[KVCache, Mover]:
        model = self._model
        cache = KVCache(
            model.spec, self._num_blocks * self._block_size, dtype=model.dtype, device=model.device,
            routes=self._record_routes,
        )  # fmt: skip
        return cache, Mover(cache, self._block_size, self._num_outside)

    def sleep(self) -> None:
        """Drop keys and values and all copies of weights that were made for speed."""
        if not self._is_asleep:
            self._is_asleep = True
            del self._cache, self._mover
            self._room_MV = None
        self._model.forget_packed()

    def wake(self) -> None:
        """Have a cache again, an empty one, if there is none."""
        if self._is_asleep:
            self._cache, self._mover = self._make()
            self._is_asleep = False

    def move(self, copies: list[Copy]) -> float:
        """Carry out a plan's copies, before it is run; returns the seconds that those out of the pool and back took."""
        self.wake()
        return self._mover.move(copies)

    def block_copy_s(self) -> float:
        """What a block takes one way, measured; nothing may be in the cache yet."""
        return self._mover.measure()

    def routes(self, request: Request) -> Routes | None:
        """The experts of a request's tokens, whoever computed them; missing for those that have no place in the cache
        (any more). None: this engine does not record them."""
        if not self._record_routes:
            return None
        width = self._model.spec.route_width
        if self._is_asleep or request.seat == NO_SEAT:
            return missing(width, request.num_tokens)
        slots_C = torch.from_numpy(self._seats.slots_MN[request.seat, : request.num_computed].astype(np.int64))
        assert self._cache.routes is not None
        found_CR = self._cache.routes.index_select(0, slots_C.to(self._cache.routes.device)).cpu().numpy()
        known = Routes(width=width, experts=array("h", found_CR.tobytes()))
        return known.rows(0, request.num_tokens)

    @torch.no_grad()
    def run(self, plan: StepPlan) -> Sampled:
        """Compute the plan's tokens; returns what was drawn for each of ``plan.sampled``. Log-probabilities of
        prompts, where asked for, are written to their requests."""
        self.wake()
        context, ids_T, positions_T, rows_N = self._pack(plan)
        hidden_TE = self._model(ids_T, positions_T, context)
        first = len(plan.decodes)
        for chunk in plan.chunks:
            if chunk.request.prompt_logprobs is not None:
                self._score_prompt(chunk, hidden_TE[first : first + chunk.count])
            first += chunk.count
        if not len(rows_N):
            return Sampled([], [], [])
        if len(rows_N) < len(hidden_TE):
            hidden_TE = hidden_TE.index_select(0, torch.from_numpy(rows_N).to(hidden_TE.device))
        logits_NV = self._logits(hidden_TE)
        for row, request in enumerate(plan.sampled):
            if is_shaped(request):
                shape(logits_NV[row], request)
        draws = self._draws(plan.sampled)
        portable = self._model.ops.portable
        tokens_N, logprobs_N = sample(logits_NV, draws, portable=portable)
        counts = [request.params.top_logprobs for request in plan.sampled]
        tops = [
            likeliest(logits_NV, draws, row, count, portable=portable) if count else None
            for row, count in enumerate(counts)
        ]
        return Sampled(tokens_N.tolist(), logprobs_N.tolist(), tops)

    def _logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Of a step's last rows; valid until the next step."""
        model = self._model
        if self._room_MV is None or len(self._room_MV) < len(hidden_NE):
            shape = len(hidden_NE), model.spec.vocab_size
            self._room_MV = torch.empty(shape, dtype=torch.float32, device=model.device)
        return model.logits(hidden_NE, self._room_MV)

    def _score_prompt(self, chunk: Chunk, hidden_CE: torch.Tensor) -> None:
        """Log-probabilities at temperature 1 of the prompt's tokens that the chunk's rows predict."""
        request = chunk.request
        places = range(chunk.start + 1, min(chunk.start + chunk.count + 1, request.num_prompt))
        assert request.prompt_logprobs is not None
        for begin in range(0, len(places), HEAD_CHUNK):
            part = places[begin : begin + HEAD_CHUNK]
            logits_CV = self._model.logits(hidden_CE[begin : begin + len(part)])
            ones_C = torch.ones(len(part), device=logits_CV.device)
            logp_CV = row_logprobs(logits_CV, ones_C, portable=self._model.ops.portable)
            tokens_C = torch.from_numpy(request.tokens[part.start : part.stop].astype(np.int64)).to(logp_CV.device)
            chosen = logp_CV.gather(1, tokens_C[:, None])[:, 0]
            request.prompt_logprobs[part.start - 1 : part.stop - 1] = chosen.cpu().numpy()
            if count := request.params.top_logprobs:
                request.prompt_tops |= {place: largest(logp_CV[row], count) for row, place in enumerate(part)}

    def _pack(self, plan: StepPlan) -> tuple[AttentionContext, torch.Tensor, torch.Tensor, np.ndarray]:
        seats, num_decodes = self._seats, len(plan.decodes)
        num_rows = num_decodes + sum(chunk.count for chunk in plan.chunks)
        packed_4T = np.empty((4, num_rows), np.int64)
        ids_T, positions_T, slots_T, starts_T = packed_4T
        if num_decodes:
            row = slice(0, num_decodes)
            positions_T[row] = [request.num_computed for request in plan.decodes]
            ids_T[row] = [request.tokens[request.num_computed] for request in plan.decodes]
            seats_D = np.array([request.seat for request in plan.decodes])
            slots_T[row] = seats.slots_MN[seats_D, positions_T[row]]
            starts_T[row] = seats_D * seats.width
        rows_N = list(range(num_decodes))
        first = num_decodes
        for chunk in plan.chunks:
            row, tokens = slice(first, first + chunk.count), slice(chunk.start, chunk.start + chunk.count)
            ids_T[row] = chunk.request.tokens[tokens]
            positions_T[row] = np.arange(tokens.start, tokens.stop)
            slots_T[row] = seats.slots_MN[chunk.request.seat, tokens]
            starts_T[row] = chunk.request.seat * seats.width
            first += chunk.count
            if chunk.is_last:
                rows_N.append(first - 1)
        device = self._model.device
        lists_L = self._slots_L
        if device.type != "cpu":  # the lists of this step's requests alone, one after the other
            seats_M, which_T = np.unique(starts_T // seats.width, return_inverse=True)
            longest = int(positions_T.max()) + 1
            lists_L = torch.from_numpy(np.ascontiguousarray(seats.slots_MN[seats_M, :longest]).reshape(-1))
            starts_T[:] = which_T * longest
        host_4T = torch.from_numpy(packed_4T)
        ids, positions, slots, starts = _moved(host_4T, device)
        keys = KeyIndex(
            _moved(lists_L, device), starts, (positions + 1).int(), host=(host_4T[3], (host_4T[1] + 1).int())
        )
        noted = None if self._cache.routes is None else RouteLog(self._cache.routes, slots)
        context = AttentionContext(keys=keys, cache=self._cache, write_slots_T=slots, routes=noted)
        return context, ids, positions, np.array(rows_N, np.int64)

    def _draws(self, sampled: list[Request]) -> Draws:
        seats = self._seats
        seats_N = np.array([request.seat for request in sampled])
        return Draws(
            seats.temperature_M[seats_N],
            seats.top_k_M[seats_N],
            seats.top_p_M[seats_N],
            seats.seed_M[seats_N],
            np.array([request.num_generated for request in sampled]),
        )


def _moved(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; to an accelerator by pinned memory, so that the host goes on meanwhile."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
