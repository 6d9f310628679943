"""Weights in memory that two processes of one host share: two slots, of which one is served and one is written.

Owns: an anonymous memory file, which the kernel takes back with its last process, however that ends. The sampling
side computes on the very pages that the training side wrote: one copy a version, and none to switch.
Refuses: deciding when a slot is free; who sends to the one that is served changes weights under a running step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.engine.transports.transport import Layout, put_summed
from tandem.kernels.pages import memory_file, prefer_large_pages

SLOTS = 2


class _Memory:
    """The mapped file: the fixed area, then the slots."""

    def __init__(self, layout: Layout, file: int) -> None:
        self.layout = layout
        size = max(1, layout.fixed_bytes + SLOTS * layout.moving_bytes)
        if os.fstat(file).st_size < size:
            raise EngineError(f"the shared memory has {os.fstat(file).st_size} bytes, the weights need {size}")
        self._map = mmap.mmap(file, size)
        prefer_large_pages(self._map)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Give the pages back to the system, for both processes; what is read there is 0 until it is written."""
        self._map.madvise(mmap.MADV_REMOVE)

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """Views of the memory, in order of the layout."""
        start = self.layout.fixed_bytes + slot * self.layout.moving_bytes
        fixed = self._bytes[: self.layout.fixed_bytes]
        moving = self._bytes[start : start + self.layout.moving_bytes]
        return {place.name: place.of(fixed if place.is_fixed else moving) for place in self.layout.places}


class SharedMemorySender:
    """Writes the live ``tensors`` of this process."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        try:
            self._file = memory_file("tandem-weights", max(1, layout.fixed_bytes + SLOTS * layout.moving_bytes))
        except OSError as error:
            raise EngineError(f"no shared memory for two copies of the weights: {error}") from error
        try:
            memory = _Memory(layout, self._file)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise EngineError(f"no shared memory for two copies of the weights: {error}") from error
        self._sums_N8 = np.zeros((len(layout.places), 8), np.uint64)
        self._moving = [number for number, place in enumerate(layout.places) if not place.is_fixed]
        fixed = [number for number, place in enumerate(layout.places) if place.is_fixed]
        self._pairs = [
            [(tensors[name], place) for name, place in memory.tensors(slot).items()] for slot in range(SLOTS)
        ]
        self._fixed, self._places = fixed, layout.places
        self._memory = memory
        self._is_empty = True

    @property
    def files(self) -> tuple[int, ...]:
        return (self._file,)

    def send(self, slot: int) -> np.ndarray:
        if self._is_empty:
            self._put(self._fixed, slot)
            self._is_empty = False
        self._put(self._moving, slot)
        return self._sums_N8.copy()

    def _put(self, numbers: list[int], slot: int) -> None:
        tensors, targets = zip(*(self._pairs[slot][number] for number in numbers), strict=True) if numbers else ((), ())
        self._sums_N8[numbers] = put_summed(tensors, targets, [self._places[number] for number in numbers])

    def release(self) -> None:
        self._memory.release()
        self._is_empty = True

    def close(self) -> None:
        """Give the memory back; the other process computes on it no more."""
        if self._pairs:
            self._memory.release()  # at once, not when the last view of it is collected
            self._pairs = []
            os.close(self._file)


class SharedMemoryReceiver:
    """Reads what the sender wrote, where it wrote it."""

    def __init__(self, layout: Layout, files: Sequence[int]) -> None:
        self._memory: _Memory | None = _Memory(layout, files[0])

    def receive(self, slot: int) -> dict[str, Tensor]:
        assert self._memory is not None, "closed"
        return self._memory.tensors(slot)

    def close(self) -> None:
        self._memory = None


class _SharedMemory:
    def sender(self, layout: Layout, tensors: Mapping[str, Tensor]) -> SharedMemorySender:
        return SharedMemorySender(layout, tensors)

    def receiver(self, layout: Layout, files: Sequence[int]) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(layout, files)


TRANSPORT = _SharedMemory()
