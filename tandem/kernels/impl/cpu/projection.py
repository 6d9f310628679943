"""Projections of bfloat16 rows by packed weights.

Owns: the layout of a packed weight and the choice of instructions. Invariant: one kind of instructions in a process,
since two give a row other bits.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from tandem.kernels.impl.cpu.build import library

NONE, TILES, PAIRS = 0, 1, 2  # instructions: no such, of whole tiles (AMX), of pairs of numbers (AVX512_BF16)
OUTS, INS = 16, 32


class _Projection(ctypes.Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("x", "packed", "out", "bias")]
        + [(name, c_int64) for name in ("x_row", "out_row", "m", "n", "k", "wide", "threads", "road", "kind",
                                        "activation")]
    )  # fmt: skip


@functools.cache
def road() -> int:
    """The best instructions that this machine has."""
    if library() is None:
        return NONE
    return TILES if library().tiles_ready() else PAIRS if library().pairs_ready() else NONE


def pack(weight_NK: Tensor) -> Tensor:
    """A bfloat16 weight in the order in which ``linear`` reads it; padded with zeros to whole tiles, so somewhat
    larger."""
    outs, ins = weight_NK.shape
    weight_NK = weight_NK.contiguous()
    packed = torch.empty(-(-outs // OUTS) * OUTS * (-(-ins // INS) * INS), dtype=torch.bfloat16)
    library().tiles_pack(
        c_void_p(weight_NK.data_ptr()), c_void_p(packed.data_ptr()), c_int64(outs), c_int64(ins),
        c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return packed


def linear(x_TK: Tensor, packed: Tensor, num_out: int, *, road: int, wide: bool = False) -> Tensor:
    """``x @ weight.T`` for a packed weight, ``[T, num_out]``, rounded to bfloat16; ``wide``: held as float32."""
    rows, size = x_TK.shape
    if size % INS or x_TK.stride(1) != 1:
        x_TK = torch.nn.functional.pad(x_TK, (0, -size % INS)).contiguous()
    out_TN = torch.empty((rows, num_out), dtype=torch.float32 if wide else torch.bfloat16)
    told = _Projection(
        x=x_TK.data_ptr(), packed=packed.data_ptr(), out=out_TN.data_ptr(), x_row=x_TK.stride(0), out_row=num_out,
        m=rows, n=num_out, k=x_TK.shape[1], wide=wide, threads=torch.get_num_threads(), road=road,
    )  # fmt: skip
    library().projection(ctypes.byref(told))
    return out_TN
