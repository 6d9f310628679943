"""Runs a plan: packed tensors in, tokens out.

Owns: the KV cache's tensors and the conversion of a plan. Refuses: decisions, the version of the weights.
Invariants: one forward pass a step, whatever it mixes; one conversion of host arrays to tensors a step. On the CPU
the key index is the seats' own array, not a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tandem.core.types import Top
from tandem.engine.infer.mover import Mover
from tandem.engine.infer.request import Request
from tandem.engine.infer.sampler import Draws, largest, likeliest, sample
from tandem.engine.infer.scheduler import Chunk, StepPlan
from tandem.engine.infer.seats import Seats
from tandem.engine.infer.shaping import is_shaped, shape
from tandem.engine.infer.tier import Copy
from tandem.kernels.functions import HEAD_CHUNK, row_logprobs
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext, KVCache
from tandem.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step drew, one entry for each of ``plan.sampled``."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[Top | None]


class Runner:
    """A model with a KV cache."""

    def __init__(self, model: CausalLM, seats: Seats, num_blocks: int, block_size: int, num_outside: int = 0) -> None:
        """A pool of ``num_blocks``, and room for ``num_outside`` more in CPU memory."""
        self._model = model
        self._seats = seats
        self._num_blocks, self._block_size, self._num_outside = num_blocks, block_size, num_outside
        self._cache, self._mover = self._make()
        self._is_asleep = False
        self._slots_L = torch.from_numpy(seats.slots_MN.reshape(-1))

    def _make(self) -> tuple[KVCache, Mover]:
        model = self._model
        cache = KVCache(model.spec, self._num_blocks * self._block_size, dtype=model.dtype, device=model.device)
        return cache, Mover(cache, self._block_size, self._num_outside)

    def sleep(self) -> None:
        """Drop keys and values and all copies of weights that were made for speed."""
        if not self._is_asleep:
            self._is_asleep = True
            del self._cache, self._mover
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
        logits_NV = self._model.ops.logits(hidden_TE, self._model.head_weight)
        for row, request in enumerate(plan.sampled):
            if is_shaped(request):
                shape(logits_NV[row], request)
        draws = self._draws(plan.sampled)
        tokens_N, logprobs_N = sample(logits_NV, draws)
        counts = [request.params.top_logprobs for request in plan.sampled]
        tops = [likeliest(logits_NV, draws, row, count) if count else None for row, count in enumerate(counts)]
        return Sampled(tokens_N.tolist(), logprobs_N.tolist(), tops)

    def _score_prompt(self, chunk: Chunk, hidden_CE: torch.Tensor) -> None:
        """Log-probabilities at temperature 1 of the prompt's tokens that the chunk's rows predict."""
        request = chunk.request
        places = range(chunk.start + 1, min(chunk.start + chunk.count + 1, request.num_prompt))
        assert request.prompt_logprobs is not None
        for begin in range(0, len(places), HEAD_CHUNK):
            part = places[begin : begin + HEAD_CHUNK]
            logits_CV = self._model.ops.logits(hidden_CE[begin : begin + len(part)], self._model.head_weight)
            logp_CV = row_logprobs(logits_CV, torch.ones(len(part), device=logits_CV.device))
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
        ids, positions, slots, starts = torch.from_numpy(packed_4T).to(device)
        counts = (positions + 1).int()
        context = AttentionContext(
            keys=KeyIndex(self._slots_L.to(device), starts, counts), cache=self._cache, write_slots_T=slots
        )
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
