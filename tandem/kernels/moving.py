"""Copies of tensors that are summed on their way, and sums alone: what finds a weight that did not arrive.

Owns: the definition of a sum and its two implementations (C, NumPy), which agree in every bit. Refuses: devices other
than the CPU, secrets (a sum finds faults, not forgeries).
Invariant: the sum of a buffer depends on its bytes alone, not on threads, parts or alignment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.impl.cpu.build import library

ROW_BYTES = 64
WORDS = 8
PART_ROWS = 1 << 14  # a thread's portion: 1 MiB
KEYS = np.array(
    [0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
     0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0], np.uint64
)  # fmt: skip
STEP = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)


class _Part(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("first_row", ctypes.c_int64),
    )  # fmt: skip


def copy_summed(pairs: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Copy each source into its target in one pass over the memory; returns the sums of the sources,
    ``[pairs, 8]`` uint64. Both are contiguous tensors of one type and size on the CPU."""
    return _move([(source.detach(), target) for source, target in pairs])


def sums_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """The sum of each contiguous tensor on the CPU, ``[tensors, 8]`` uint64."""
    return _move([(tensor.detach(), None) for tensor in tensors])


def _move(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> np.ndarray:
    buffers = [(_bytes_of(source), None if target is None else _bytes_of(target)) for source, target in pairs]
    for source, target in buffers:
        if target is not None and len(target) != len(source):
            raise ValueError(f"a copy of {len(source)} bytes into {len(target)}")
    sums_B8 = np.zeros((len(buffers), WORDS), np.uint64)
    kernels = library()
    if kernels is None:
        for number, (source, target) in enumerate(buffers):
            sums_B8[number] = reference_sum(source)
            if target is not None:
                target[:] = source
        return sums_B8
    parts: list[_Part] = []
    owners: list[int] = []
    for number, (source, target) in enumerate(buffers):
        rows = len(source) // ROW_BYTES
        for first in range(0, rows, PART_ROWS):
            at = first * ROW_BYTES
            place = None if target is None else target.ctypes.data + at
            parts.append(_Part(source.ctypes.data + at, place, None, min(PART_ROWS, rows - first), first))
            owners.append(number)
    sums_P8 = np.zeros((len(parts), WORDS), np.uint64)
    for number, part in enumerate(parts):
        part.sums = sums_P8.ctypes.data + number * sums_P8.strides[0]
    threads = ctypes.c_int64(torch.get_num_threads())
    kernels.tandem_move((_Part * len(parts))(*parts), ctypes.c_int64(len(parts)), threads)
    np.add.at(sums_B8, owners, sums_P8)
    for number, (source, target) in enumerate(buffers):  # the last bytes, which fill no row
        whole = len(source) // ROW_BYTES * ROW_BYTES
        if whole < len(source):
            sums_B8[number] += reference_sum(source[whole:], first_row=whole // ROW_BYTES)
            if target is not None:
                target[whole:] = source[whole:]
    return sums_B8


def reference_sum(buffer: np.ndarray, *, first_row: int = 0) -> np.ndarray:
    """The definition: over rows of eight words (the last one filled up with zeros), the sum modulo 2^64 of each word
    and of the product of its halves after it was mixed with its row's key."""
    filled = np.zeros(-(-len(buffer) // ROW_BYTES) * ROW_BYTES, np.uint8)
    filled[: len(buffer)] = buffer
    words_R8 = filled.view(np.uint64).reshape(-1, WORDS)
    rows_R1 = np.arange(first_row, first_row + len(words_R8), dtype=np.uint64)[:, None]
    mixed_R8 = words_R8 ^ (KEYS + STEP * rows_R1)
    return (words_R8 + (mixed_R8 & _LOW) * (mixed_R8 >> np.uint64(32))).sum(0, dtype=np.uint64)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a contiguous tensor on the CPU is wanted, not {tuple(tensor.stride())} on {tensor.device}")
    return tensor.reshape(-1).view(torch.uint8).numpy()
