"""Projections by weights in whole numbers of 8 bits, one scale an output: half the bytes of bfloat16.

Owns: their layout, which ``whole.c`` describes, and its definition in PyTorch. Rows keep 16 bits. Invariant: a row's
bits depend on that row alone and are the same for all instructions, for sums of whole numbers have no order.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels.impl.cpu.build import library
from tandem.kernels.impl.cpu.projection import Projection
from tandem.kernels.moving import sums_of

WHOLE = 4  # beside the other roads of ``projection``
OUTS, INS = 16, 64
MOST_WEIGHT, MOST_ROW = 127, 32639


def _size(outs: int, ins: int) -> tuple[int, int]:
    return -(-outs // OUTS) * OUTS, -(-ins // INS) * INS


def scratch(rows: int, ins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for rows in two halves, and their scales."""
    high, low = torch.empty((2, rows * _size(1, ins)[1]), dtype=torch.uint8)
    return high, low, torch.empty(rows)


def packed_size(weight_NK: Tensor) -> int:
    """Bytes of a weight in whole numbers, with its scales and sums."""
    across, deep = _size(*weight_NK.shape)
    return across * deep + 8 * across


def pack(weight_NK: Tensor) -> Tensor:
    """A bfloat16 weight in whole numbers, as ``linear`` reads it: bytes. Raises as ``pack_into`` does."""
    packed = torch.empty(packed_size(weight_NK), dtype=torch.uint8)
    pack_into(weight_NK, packed)
    return packed


def pack_into(weight_NK: Tensor, packed: Tensor) -> np.ndarray:
    """The same into memory that is there; returns the sum of its bytes, ``[8]`` uint64 (``kernels.moving``).

    Raises:
        EngineError: it is not finite.
    """
    outs, ins = weight_NK.shape
    assert packed.numel() == packed_size(weight_NK) and packed.is_contiguous()
    weight_NK = weight_NK.contiguous()
    asked = library().whole_pack
    asked.restype = c_int64
    broken = asked(
        c_void_p(weight_NK.data_ptr()), c_void_p(packed.data_ptr()), c_int64(outs), c_int64(ins),
        c_int64(torch.get_num_threads()),
    )  # fmt: skip
    if broken:
        raise EngineError(f"a weight of {outs} outputs is not finite in {broken} of them: it has no whole numbers")
    return sums_of([packed])[0]


def parts_of(packed: Tensor, outs: int, ins: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, int8 ``[outs, ins]``, and scales, float32 ``[outs]``."""
    across, deep = _size(outs, ins)
    tiles = packed[: across * deep].view(torch.int8).view(across // OUTS, deep // 4, OUTS, 4)
    numbers = tiles.permute(0, 2, 1, 3).reshape(across, deep)[:outs, :ins]
    scales = packed[across * deep : across * deep + 4 * across].view(torch.float32)
    return numbers, scales[:outs]


def linear(x_TK: Tensor, packed: Tensor, num_out: int, *, road: int, wide: bool = False) -> Tensor:
    """``x @ weight.T``, ``[T, num_out]``, rounded to bfloat16; ``wide``: held as float32."""
    rows, ins = x_TK.shape
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    high, low, row_scales = scratch(rows, ins)
    out_TN = torch.empty((rows, num_out), dtype=torch.float32 if wide else torch.bfloat16)
    told = Projection(
        x=x_TK.data_ptr(), packed=packed.data_ptr(), out=out_TN.data_ptr(), x_row=x_TK.stride(0), out_row=num_out,
        m=rows, n=num_out, k=_size(1, ins)[1], wide=wide, threads=torch.get_num_threads(), road=road | WHOLE,
        high=high.data_ptr(), low=low.data_ptr(), row_scales=row_scales.data_ptr(),
    )  # fmt: skip
    library().whole_projection(ctypes.byref(told), c_int64(ins))
    return out_TN


def reference(x_TK: Tensor, numbers_NK: Tensor, scales_N: Tensor) -> Tensor:
    """The definition of ``linear``, bit for bit, for finite rows."""
    x = x_TK.float().numpy()
    most = np.abs(x).max(1, keepdims=True)
    row_scales = most / np.float32(MOST_ROW)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(most > 0, np.float32(MOST_ROW) / most, np.float32(0)).astype(np.float32)
    whole = np.rint(x * inverse).astype(np.int64)
    sums = (whole @ numbers_NK.numpy().astype(np.int64).T).astype(np.float32)
    return torch.from_numpy(sums * row_scales * scales_N.numpy()).bfloat16()
