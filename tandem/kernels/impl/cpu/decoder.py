"""All layers of a dense bfloat16 decoder in one call, with the bits of the operations one by one.

Owns: the description that ``decoder.c`` reads, and which shapes it takes. Refuses: gradients, mixtures of experts,
weights that are not packed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.impl.cpu import whole
from tandem.kernels.impl.cpu.build import library
from tandem.kernels.impl.cpu.native import ACTIVATIONS
from tandem.kernels.impl.cpu.projection import INS

NORMS = ("attention_norm", "attention_post", "mlp_norm", "mlp_post", "query_norm", "key_norm")
PACKED = ("qkv", "out", "gate_up", "down")
BIASES = ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")


class _Layer(ctypes.Structure):
    _fields_ = (
        [(name, c_void_p) for name in (*NORMS, *PACKED, *BIASES, "keys", "values")]
        + [(name, c_int64) for name in ("window", "local")]
    )  # fmt: skip


class _Decoder(ctypes.Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("layers", "last_norm", "x", "normed", "qkv", "attended", "inner")]
        + [("cosine", c_void_p * 2), ("sine", c_void_p * 2)]
        + [(name, c_void_p) for name in ("write_slots", "slots", "starts", "counts")]
        + [(name, c_int64) for name in ("num_layers", "rows", "hidden", "heads", "groups", "size", "mlp", "offset",
                                        "activation", "threads", "road")]
        + [(name, c_void_p) for name in ("high", "low", "row_scales")]
        + [("eps", c_float), ("scale", c_float)]
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all layers have in common."""

    hidden: int
    heads: int
    groups: int
    size: int  # dimensions of a head
    mlp: int
    eps: float
    scale: float
    offset: bool  # norms multiply by one more than their weight
    activation: str

    @property
    def fits(self) -> bool:
        """Whether the kernels take these sizes."""
        inputs = (self.hidden, self.heads * self.size, self.mlp)
        return self.size % 16 == 0 and not any(count % INS for count in inputs)


class Layers:
    """Layers by name of part (``NORMS``, ``PACKED``, ``BIASES``); a missing part is left out. Keeps what it points
    to."""

    def __init__(
        self, parts: Sequence[dict[str, Tensor]], windows: Sequence[int], local: Sequence[bool], last_norm: Tensor
    ) -> None:
        self._kept = (parts, last_norm)
        self.last_norm = last_norm
        self.array = (_Layer * len(parts))(
            *(
                _Layer(window=window, local=is_local, **{name: part.data_ptr() for name, part in each.items()})
                for each, window, is_local in zip(parts, windows, local, strict=True)
            )
        )

    def place(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Which caches the layers read and write, contiguous ``[slots, groups, size]``."""
        for layer, k_SGD, v_SGD in zip(self.array, keys, values, strict=True):
            layer.keys, layer.values = k_SGD.data_ptr(), v_SGD.data_ptr()


def decode(
    x_TE: Tensor, layers: Layers, shape: Shape, tables: Sequence[tuple[Tensor, Tensor]],
    index: tuple[Tensor, Tensor, Tensor], write_slots_T: Tensor, road: int,
) -> Tensor:  # fmt: skip
    """Rows behind the last norm, ``[T, hidden]``; ``x_TE``, the embeddings, is written over. ``tables``: cosines and
    sines of the rows, float32 ``[T, size]``, for all layers or for those that are not local and those that are;
    ``index``: (slots int32, starts int64, counts int32).

    Raises:
        MemoryError: no scratch memory.
    """
    rows = x_TE.shape[0]
    query = shape.heads * shape.size
    normed_TE = torch.empty_like(x_TE)
    qkv, attended, inner = (
        torch.empty(rows * count, dtype=torch.bfloat16)
        for count in (query + 2 * shape.groups * shape.size, query, shape.mlp)
    )
    slots, starts, counts = (each.contiguous() for each in index)
    write_slots_T = write_slots_T.contiguous()
    high, low, row_scales = whole.scratch(rows, max(shape.hidden, query, shape.mlp) if road & whole.WHOLE else 0)
    tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in tables]
    pairs = [tables[0], tables[-1]]
    told = _Decoder(
        layers=ctypes.addressof(layers.array), last_norm=layers.last_norm.data_ptr(), x=x_TE.data_ptr(),
        normed=normed_TE.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr(), inner=inner.data_ptr(),
        cosine=(c_void_p * 2)(*(cos.data_ptr() for cos, _ in pairs)),
        sine=(c_void_p * 2)(*(sin.data_ptr() for _, sin in pairs)),
        write_slots=write_slots_T.data_ptr(), slots=slots.data_ptr(), starts=starts.data_ptr(),
        counts=counts.data_ptr(), num_layers=len(layers.array), rows=rows, hidden=shape.hidden, heads=shape.heads,
        groups=shape.groups, size=shape.size, mlp=shape.mlp, offset=shape.offset,
        activation=ACTIVATIONS.index(shape.activation), threads=torch.get_num_threads(), road=road,
        high=high.data_ptr(), low=low.data_ptr(), row_scales=row_scales.data_ptr(), eps=shape.eps, scale=shape.scale,
    )  # fmt: skip
    if library().decode(ctypes.byref(told)):
        raise MemoryError("scratch memory of the decoder")
    return normed_TE
