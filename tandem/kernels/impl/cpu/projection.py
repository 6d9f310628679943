"""Projections of bfloat16 rows by packed weights.

Owns: the layout of a packed weight and the choice of instructions. Invariant: one kind of instructions in a process,
since two give a row other bits.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.impl.cpu.build import library
from tandem.kernels.moving import pack_summed

# Instructions: none (no kernels), of whole tiles (AMX), of pairs of numbers (AVX512_BF16), of single numbers (any).
NONE, TILES, PAIRS, SINGLES = 0, 1, 2, 8
OUTS, INS = 16, 32


class Projection(ctypes.Structure):
    """What the C functions are told (``kernels.h``)."""

    _fields_ = (
        [(name, c_void_p) for name in ("x", "packed", "out", "bias")]
        + [(name, c_int64) for name in ("x_row", "out_row", "m", "n", "k", "wide", "threads", "road", "kind",
                                        "activation")]
        + [(name, c_void_p) for name in ("high", "low", "row_scales")]
    )  # fmt: skip


@functools.cache
def road() -> int:
    """The best instructions that this machine has."""
    return next((kind for kind in (TILES, PAIRS, SINGLES) if serves(kind)), NONE)


def serves(road: int) -> bool:
    """Whether this machine has these instructions."""
    if library() is None or road in (NONE, SINGLES):
        return road == NONE or library() is not None
    return bool((library().tiles_ready if road == TILES else library().pairs_ready)())


def packed_size(weight_NK: Tensor) -> int:
    """Numbers of a weight in the order in which ``linear`` reads it, filled up with zeros to whole tiles."""
    outs, ins = weight_NK.shape
    return -(-outs // OUTS) * OUTS * (-(-ins // INS) * INS)


def pack(weight_NK: Tensor) -> Tensor:
    """A bfloat16 weight in that order."""
    packed = torch.empty(packed_size(weight_NK), dtype=torch.bfloat16)
    pack_into(weight_NK, packed)
    return packed


def pack_into(weight_NK: Tensor, packed: Tensor) -> np.ndarray:
    """The same into memory that is there, which may be the weight's own where nothing is filled up; returns the sum of
    what was written, ``[8]`` uint64 (``kernels.moving``).

    Raises:
        MemoryError: no scratch memory; what was written is in doubt.
    """
    weight_NK = weight_NK.contiguous()
    assert packed.numel() == packed_size(weight_NK) and packed.is_contiguous()
    return pack_summed([(weight_NK, packed, (weight_NK.shape[0], weight_NK.shape[1]))])[0]


def rows_of(packed: Tensor, ids_T: Tensor, num_in: int) -> Tensor:
    """Rows of a packed weight as they were before, ``[T, num_in]``. The ids are those of rows there are."""
    ids_T = ids_T.long().contiguous()
    out_TK = torch.empty((len(ids_T), num_in), dtype=torch.bfloat16)
    library().tiles_rows(
        c_void_p(packed.data_ptr()), c_void_p(ids_T.data_ptr()), c_void_p(out_TK.data_ptr()), c_int64(len(ids_T)),
        c_int64(num_in), c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return out_TK


def linear(
    x_TK: Tensor, packed: Tensor, num_out: int, *, road: int, wide: bool = False, out_TN: Tensor | None = None
) -> Tensor:
    """``x @ weight.T`` for a packed weight, ``[T, num_out]``, rounded to bfloat16; ``wide``: held as float32.
    ``out_TN``: contiguous memory of that shape and type to write to."""
    rows, size = x_TK.shape
    if size % INS or x_TK.stride(1) != 1:
        x_TK = torch.nn.functional.pad(x_TK, (0, -size % INS)).contiguous()
    if out_TN is None:
        out_TN = torch.empty((rows, num_out), dtype=torch.float32 if wide else torch.bfloat16)
    told = Projection(
        x=x_TK.data_ptr(), packed=packed.data_ptr(), out=out_TN.data_ptr(), x_row=x_TK.stride(0), out_row=num_out,
        m=rows, n=num_out, k=x_TK.shape[1], wide=wide, threads=torch.get_num_threads(), road=road,
    )  # fmt: skip
    library().projection(ctypes.byref(told))
    return out_TN
