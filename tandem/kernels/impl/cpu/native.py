"""The C kernels as functions of tensors.

Owns: pointers, strides and type codes. Refuses: gradients (``ops`` joins forward and backward), shapes the kernels
do not take (``supports`` says which).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from tandem.kernels.impl.cpu.build import library

TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = ("silu", "gelu_tanh")
LANES = 16


class _Attention(ctypes.Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("q", "k", "v", "out", "lse", "slots", "starts", "counts")]
        + [(name, c_int64) for name in ("rows", "heads", "groups", "size")]
        + [(name, c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")]
        + [(name, c_int64) for name in ("window", "type", "threads")]
        + [("scale", c_float)]
    )


class _Backward(ctypes.Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("q_scaled", "grad", "dq", "dk", "dv", "delta", "readers", "reader_starts")]
        + [("slots", c_int64)]
    )


def available() -> bool:
    """Whether the kernels could be built on this machine."""
    return library() is not None


def supports(x: Tensor, head_dim: int = LANES) -> bool:
    """Whether the kernels take this tensor."""
    return x.device.type == "cpu" and x.dtype in TYPES and head_dim % LANES == 0 and library() is not None


def _describe(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, index: tuple[Tensor, Tensor, Tensor],
    scale: float, window: int,
) -> _Attention:  # fmt: skip
    slots, starts, counts = index
    return _Attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr() if lse is not None else None,
        slots.data_ptr(), starts.data_ptr(), counts.data_ptr(),
        q.shape[0], q.shape[1], k.shape[1], q.shape[2],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        window, TYPES[q.dtype], torch.get_num_threads(), scale,
    )  # fmt: skip


def attention_forward(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, index: tuple[Tensor, Tensor, Tensor], scale: float, window: int,
    *, with_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output ``[T, H, D]`` and, if wanted, the log-sum-exp ``[T, H]`` that the backward pass needs. The last
    dimension of q, k, v is contiguous; ``index`` is (slots int32, starts int64, counts int32)."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32) if with_lse else None
    described = _describe(q_THD, k_SGD, v_SGD, out_THD, lse_TH, index, scale, window)
    if library().attention_forward(ctypes.byref(described)):
        raise MemoryError("attention scratch memory")
    return out_THD, lse_TH


def attention_backward(
    grad_THD: Tensor, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, out_THD: Tensor, lse_TH: Tensor,
    index: tuple[Tensor, Tensor, Tensor], readers: tuple[Tensor, Tensor], scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v in float32. ``readers``: rows that list each slot, and where each slot's begin."""
    q_scaled = q_THD.float().mul(scale).contiguous()
    grad = grad_THD.float().contiguous()
    dq, dk, dv = torch.empty_like(q_scaled), torch.empty(k_SGD.shape), torch.empty(v_SGD.shape)
    delta = torch.empty(q_THD.shape[:2])
    described = _describe(q_THD, k_SGD, v_SGD, out_THD, lse_TH, index, scale, window)
    backward = _Backward(
        q_scaled.data_ptr(), grad.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), delta.data_ptr(),
        readers[0].data_ptr(), readers[1].data_ptr(), k_SGD.shape[0],
    )  # fmt: skip
    library().attention_backward(ctypes.byref(described), ctypes.byref(backward))
    return dq, dk, dv


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: bool, with_inverse: bool
) -> tuple[Tensor, Tensor | None]:
    """Normalised rows, times the weight or (``offset``) one more than it, and 1 / rms of each row if wanted."""
    rows, size = x_TD.shape
    out = torch.empty((rows, size), dtype=x_TD.dtype)
    inverse = torch.empty(rows) if with_inverse else None
    library().rms_norm(
        c_void_p(x_TD.data_ptr()), c_int64(x_TD.stride(0)), c_void_p(weight_D.data_ptr()), c_void_p(out.data_ptr()),
        c_void_p(inverse.data_ptr() if inverse is not None else None), c_int64(rows), c_int64(size), c_float(eps),
        c_int64(offset), c_int64(TYPES[x_TD.dtype]), c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return out, inverse


def rope(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, sign: float) -> Tensor:
    """Rows turned by their angles (``sign`` 1) or back (-1)."""
    rows, heads, size = x_THD.shape
    out = torch.empty((rows, heads, size), dtype=x_THD.dtype)
    library().rope(
        c_void_p(x_THD.data_ptr()), c_int64(x_THD.stride(0)), c_int64(x_THD.stride(1)), c_void_p(cos_TD.data_ptr()),
        c_void_p(sin_TD.data_ptr()), c_void_p(out.data_ptr()), c_int64(rows), c_int64(heads), c_int64(size),
        c_float(sign), c_int64(TYPES[x_THD.dtype]), c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return out


def gate_mul(gate_TF: Tensor, up_TF: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, one of ``ACTIVATIONS``; both have the same row stride."""
    rows, size = gate_TF.shape
    out = torch.empty((rows, size), dtype=gate_TF.dtype)
    library().gate_mul(
        c_void_p(gate_TF.data_ptr()), c_void_p(up_TF.data_ptr()), c_int64(gate_TF.stride(0)), c_void_p(out.data_ptr()),
        c_int64(rows), c_int64(size), c_int64(ACTIVATIONS.index(activation)), c_int64(TYPES[gate_TF.dtype]),
        c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return out
