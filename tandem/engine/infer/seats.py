"""The seats of running requests: what a step needs of each of them, as rows of arrays.

Owns: slot numbers of every token of every seated request, and its sampling parameters. Refuses: tensors, decisions.
Invariant: a step reads rows of these arrays; they are written only when a request sits down or gets a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.engine.infer.request import NO_SEAT, Request


class Seats:
    """Rows for ``num_seats`` requests of at most ``width`` tokens."""

    def __init__(self, num_seats: int, width: int, block_size: int) -> None:
        blocks = -(-width // block_size)
        self.width = blocks * block_size
        self.slots_MN = np.zeros((num_seats, self.width), np.int32)
        self.temperature_M = np.ones(num_seats, np.float32)
        self.top_p_M = np.ones(num_seats, np.float64)
        self.top_k_M = np.zeros(num_seats, np.int64)
        self.seed_M = np.zeros(num_seats, np.uint64)
        self._block_size = block_size
        self._offsets = np.arange(block_size, dtype=np.int32)
        self._free = list(range(num_seats - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request) -> None:
        """Seat a request that holds its blocks."""
        seat = self._free.pop()
        params = request.params
        request.seat = seat
        self.temperature_M[seat] = params.temperature
        self.top_p_M[seat] = params.top_p
        self.top_k_M[seat] = params.top_k
        self.seed_M[seat] = request.seed & (2**64 - 1)
        self.extend(request, 0, request.blocks)

    def extend(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """Number the slots of blocks that follow the first ``first`` ones of a seated request."""
        size = self._block_size
        slots = np.asarray(blocks, np.int32)[:, None] * size + self._offsets
        self.slots_MN[request.seat, first * size : (first + len(blocks)) * size] = slots.reshape(-1)

    def leave(self, request: Request) -> None:
        self._free.append(request.seat)
        request.seat = NO_SEAT
