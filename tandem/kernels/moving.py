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
PORTION_BYTES = 1 << 20  # what a thread takes at once
KEYS = np.array(
    [0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
     0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0], np.uint64
)  # fmt: skip
STEP = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)


class _Move(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("sums", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64), ("outs", ctypes.c_int64), ("ins", ctypes.c_int64),
    )  # fmt: skip


def copy_summed(pairs: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Copy each source into its target in one pass over the memory; returns the sums of the sources,
    ``[pairs, 8]`` uint64. Both are contiguous tensors of one type and size on the CPU."""
    return _move([(source, target, None) for source, target in pairs])


def pack_summed(triples: Sequence[tuple[Tensor, Tensor, tuple[int, int] | None]]) -> np.ndarray:
    """The same, and those with a shape (outputs, inputs) are bfloat16 weights which the target gets packed for our
    projections (``impl.cpu.projection``; it has room for that, and may be the source where nothing is filled up). The
    sums are of what is in the targets then.

    Raises:
        MemoryError: no scratch memory; what the targets hold is in doubt.
    """
    return _move(triples)


def sums_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """The sum of each contiguous tensor on the CPU, ``[tensors, 8]`` uint64."""
    return _move([(tensor, None, None) for tensor in tensors])


def _move(triples: Sequence[tuple[Tensor, Tensor | None, tuple[int, int] | None]]) -> np.ndarray:
    sums_B8 = np.zeros((len(triples), WORDS), np.uint64)
    moves = (_Move * len(triples))()
    for number, (source, target, packed) in enumerate(triples):
        num_bytes = _bytes_of(source)
        if target is not None and packed is None and _bytes_of(target) != num_bytes:
            raise ValueError(f"a copy of {num_bytes} bytes into {_bytes_of(target)}")
        move = moves[number]
        move.source, move.num_bytes = source.data_ptr(), num_bytes
        move.sums = sums_B8.ctypes.data + number * sums_B8.strides[0]
        if target is not None:
            move.target = target.data_ptr()
        if packed is not None:
            move.outs, move.ins = packed
    kernels = library()
    if kernels is None:
        for number, (source, target, packed) in enumerate(triples):
            assert packed is None, "packed weights are read by kernels"
            sums_B8[number] = reference_sum(source.detach().reshape(-1).view(torch.uint8).numpy())
            if target is not None:
                target.copy_(source.detach())
    elif kernels.tandem_move(moves, ctypes.c_int64(len(moves)), ctypes.c_int64(torch.get_num_threads())):
        raise MemoryError("scratch memory to move weights")
    return sums_B8


def reference_sum(buffer: np.ndarray) -> np.ndarray:
    """The definition: over rows of eight words (the last one filled up with zeros), the sum modulo 2^64 of each word
    and of the product of its halves after it was mixed with its row's key."""
    filled = np.zeros(-(-len(buffer) // ROW_BYTES) * ROW_BYTES, np.uint8)
    filled[: len(buffer)] = buffer
    words_R8 = filled.view(np.uint64).reshape(-1, WORDS)
    rows_R1 = np.arange(len(words_R8), dtype=np.uint64)[:, None]
    mixed_R8 = words_R8 ^ (KEYS + STEP * rows_R1)
    return (words_R8 + (mixed_R8 & _LOW) * (mixed_R8 >> np.uint64(32))).sum(0, dtype=np.uint64)


def _bytes_of(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a contiguous tensor on the CPU is wanted, not {tuple(tensor.stride())} on {tensor.device}")
    return tensor.numel() * tensor.element_size()
