"""What moves weights from the process that trains to one that samples: the contract of the kind ``transport``.

Within one process nothing is moved: the engine reads the very tensors that the trainer writes (``place`` is
``alias``). Between processes a transport has two ends. Owns: the layout of a set of tensors, and their check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.core.registry import Registry
from tandem.kernels.impl.cpu.projection import packed_size
from tandem.kernels.moving import pack_summed, sums_of

BUILTIN = {"shared_memory": "tandem.engine.transports.shared_memory:TRANSPORT"}
ALIGNMENT = 64  # bytes; what the copy's wide stores want


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor lies in a version's memory; one that ``is_fixed`` never changes and is moved once. One that
    ``is_packed`` lies there as our projections read it (``kernels.impl.cpu.projection``); ``shape`` is the weight's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes
    num_bytes: int
    is_fixed: bool
    is_packed: bool = False

    def of(self, memory: Tensor) -> Tensor:
        """The tensor in a buffer of bytes."""
        flat = memory[self.start : self.start + self.num_bytes]
        numbers = flat.view(getattr(torch, self.dtype))
        return numbers if self.is_packed else numbers.view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Places of all tensors: the fixed ones in one area, the others in another, of so many bytes."""

    places: tuple[TensorPlace, ...]
    fixed_bytes: int
    moving_bytes: int


class Sender(Protocol):
    """The end that trains."""

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors that the other process inherits."""
        ...

    def send(self, slot: int) -> np.ndarray:
        """Put the live tensors into a slot (0 or 1), each in its place's form; blocks. Returns the sums of what was
        put there, ``[tensors, 8]`` uint64."""
        ...

    def release(self) -> None:
        """Give the memory of all slots back; nobody computes on them until they are sent to again."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end that samples."""

    def receive(self, slot: int) -> dict[str, Tensor]:
        """The tensors of a slot, without a copy where that can be; they stay as they are until the slot is sent to
        again."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """A way between processes of one host."""

    def sender(self, layout: Layout, tensors: Mapping[str, Tensor]) -> Sender: ...

    def receiver(self, layout: Layout, files: Sequence[int]) -> Receiver: ...


def find_transport(name: str) -> Transport:
    """Raises PluginError: there is none of this name."""
    return Registry("transport", BUILTIN).resolve(name)  # type: ignore[return-value]


def layout_of(tensors: Mapping[str, Tensor], packed: Collection[str] = ()) -> Layout:
    """Places for tensors by name, those of ``packed`` in packed form. What needs no gradient is fixed."""
    places, ends = [], {True: 0, False: 0}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise EngineError(f"{name} lies on {tensor.device}; weights of the CPU alone are moved to another process",
                              hint="set engine.process = false, or model.device = \"cpu\"")  # fmt: skip
        is_fixed, is_packed = not tensor.requires_grad, name in packed
        num_bytes = (packed_size(tensor) if is_packed else tensor.numel()) * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name=name, dtype=dtype, shape=tuple(tensor.shape), start=ends[is_fixed],
                                  num_bytes=num_bytes, is_fixed=is_fixed, is_packed=is_packed))  # fmt: skip
        ends[is_fixed] += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(places=tuple(places), fixed_bytes=ends[True], moving_bytes=ends[False])


def put_summed(tensors: Sequence[Tensor], targets: Sequence[Tensor], places: Sequence[TensorPlace]) -> np.ndarray:
    """Copy or pack tensors into their places; returns the sums of what was written, ``[tensors, 8]`` uint64."""
    shapes = [(place.shape[0], place.shape[1]) if place.is_packed else None for place in places]
    return pack_summed(list(zip(tensors, targets, shapes, strict=True)))


def check_arrival(tensors: Mapping[str, Tensor], sums_N8: np.ndarray, *, version: int) -> None:
    """Compare what came with the sums of what was sent, both in order of the layout.

    Raises:
        EngineError: names the first tensor whose bytes are others.
    """
    wrong = (sums_of(list(tensors.values())) != sums_N8).any(1)
    if wrong.any():
        name = list(tensors)[int(wrong.argmax())]
        raise EngineError(f"weights {version} did not arrive whole: {int(wrong.sum())} of {len(wrong)} tensors are not "
                          f"what was sent, first {name}")  # fmt: skip


def digest_of(layout: Layout, sums_N8: np.ndarray) -> str:
    """One name for all bytes of a version: SHA-256 over name, type, shape and sum of each tensor."""
    total = hashlib.sha256()
    for place, sums_8 in zip(layout.places, sums_N8, strict=True):
        form = " packed" if place.is_packed else ""
        total.update(f"{place.name}{form}\x00{place.dtype}\x00{place.shape}\x00".encode() + sums_8.tobytes())
    return total.hexdigest()
