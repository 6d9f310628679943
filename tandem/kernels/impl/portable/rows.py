"""Operations on rows: projection, norm, rotation, gates; forward only, with the faces of ``impl.cpu.native``.

Invariant (row-exact): a product has one shape, tiles of ``TILE`` rows filled up with zeros, whatever shares the call;
sums are folded (``sums``); the rest is element by element. What the library does with one shape it does every time:
``self_check`` looks whether that holds.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.impl.portable.products import has_bfloat16
from tandem.kernels.impl.portable.sums import folded_sum

TILE = 64


def product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """``x @ weight.T``, tile after tile."""
    rows = x_TK.shape[0]
    x_TK = F.pad(x_TK, (0, 0, 0, -rows % TILE)).contiguous()
    if x_TK.dtype is torch.bfloat16 and x_TK.device.type == "cpu" and not has_bfloat16():
        return product(x_TK.float(), weight_NK.float()).bfloat16()[:rows]
    if len(x_TK) == TILE:
        return F.linear(x_TK, weight_NK)[:rows]
    return torch.cat([F.linear(tile, weight_NK) for tile in x_TK.split(TILE)])[:rows]


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: bool, with_inverse: bool
) -> tuple[Tensor, Tensor | None]:
    """Normalised rows, times the weight or (``offset``) one more than it, and 1 / rms of each row if wanted."""
    x = x_TD.float()
    inverse_T1 = torch.rsqrt(folded_sum(x * x) / x.shape[1] + eps)
    normed = x * inverse_T1
    out_TD = (normed * (1.0 + weight_D.float())).to(x_TD.dtype) if offset else normed.to(x_TD.dtype) * weight_D
    return out_TD, inverse_T1[:, 0] if with_inverse else None


def rope(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, sign: float) -> Tensor:
    """Rows turned by their angles (``sign`` 1) or back (-1)."""
    first, second = x_THD.float().chunk(2, dim=2)
    turned = torch.cat((-second, first), dim=2)
    return (x_THD.float() * cos_TD[:, None] + turned * (sin_TD * sign)[:, None]).to(x_THD.dtype)


def gate_mul(gate_TF: Tensor, up_TF: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, ``silu`` or ``gelu_tanh``, in float32, rounded once."""
    gate, up = gate_TF.float(), up_TF.float()
    inner = gate if activation == "silu" else gate * (gate * gate * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi))
    # Not torch.sigmoid: on the CPU its bits depend on where in the tensor a number is.
    return (gate / (1.0 + torch.exp(-inner)) * up).to(gate_TF.dtype)
