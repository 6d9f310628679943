"""Carries out a plan's copies: keys and values of whole blocks, within the pool, out of it and back.

Owns: the tensors outside the pool, in CPU memory. Refuses: decisions.
Invariant: the outcome is that of the copies one after the other, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.engine.infer.tier import Copy, Move
from tandem.models.attention import KVCache

_TRIALS = 5


class Mover:
    """The pool of ``cache`` in blocks, and ``num_outside`` more in CPU memory."""

    def __init__(self, cache: KVCache, block_size: int, num_outside: int) -> None:
        # Rows are blocks: one index of a copy is one block of one layer.
        self._pool = [
            slots.view(slots.shape[0] // block_size, block_size * slots.shape[1], *slots.shape[2:])
            for slots in (*cache.keys, *cache.values, *([] if cache.routes is None else [cache.routes]))
        ]
        pinned = self._pool[0].device.type == "cuda"
        # Not written before it is used: what is never swapped costs no memory.
        self._outside = [
            torch.empty((num_outside, *rows.shape[1:]), dtype=rows.dtype, pin_memory=pinned) for rows in self._pool
        ]

    @torch.no_grad()
    def move(self, copies: Sequence[Copy]) -> float:
        """Do them all; returns the seconds that copies out and in took."""
        spent = 0.0
        for run in _independent(copies):
            started = time.perf_counter()
            sources = torch.tensor([copy.source for copy in run])
            targets = torch.tensor([copy.target for copy in run])
            match run[0].move:
                case Move.WITHIN:
                    _copy(self._pool, self._pool, sources, targets)
                case Move.OUT:
                    _copy(self._pool, self._outside, sources, targets)
                case Move.IN:
                    _copy(self._outside, self._pool, sources, targets)
            if run[0].move is not Move.WITHIN:
                if self._pool[0].is_cuda:
                    torch.cuda.synchronize(self._pool[0].device)
                spent += time.perf_counter() - started
        return spent

    def measure(self) -> float:
        """Seconds that a block takes one way: the best of a few trials with block 0 and slot 0."""
        trials = [self.move([Copy(Move.OUT, 0, 0), Copy(Move.IN, 0, 0)]) / 2 for _ in range(_TRIALS)]
        return min(trials)


def _copy(source: list[Tensor], target: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    from_, to = sources.to(source[0].device), targets.to(target[0].device)
    for before, after in zip(source, target, strict=True):
        after.index_copy_(0, to, before.index_select(0, from_).to(after.device))


def _independent(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Runs of one kind in which no copy reads or writes what an earlier one of its run wrote."""
    run: list[Copy] = []
    written: set[int] = set()
    for copy in copies:
        clash = copy.target in written or (copy.move is Move.WITHIN and copy.source in written)
        if run and (copy.move is not run[0].move or clash):
            yield run
            run, written = [], set()
        run.append(copy)
        written.add(copy.target)
    if run:
        yield run
