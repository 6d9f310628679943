"""The parts a decoder layer is made of: linear, norm, embedding, gated MLP, rotary tables.

Owns: parameters and their shapes. Refuses: arithmetic, which is the op table's. Parameters are made empty: a
loader or an initialiser fills every one of them.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tandem.kernels.ops import Ops
from tandem.models.spec import ModelSpec, RopeSpec


class Linear(nn.Module):
    """A projection; ``weight`` is ``[out, in]``."""

    def __init__(
        self, num_in: int, num_out: int, ops: Ops, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(num_out, num_in, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(num_out, dtype=dtype, device=device)) if bias else None

        self.adapter: nn.Module | None = None  # a low-rank update of the weight (``models.lora``)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self.adapter is None:
            return self.ops.linear(x_TK, self.weight, self.bias)
        out_TN = self.adapter(x_TK, self.weight, self.ops.linear(x_TK, self.weight))
        return out_TN if self.bias is None else out_TN + self.bias


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, spec: ModelSpec, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.eps = spec.norm_eps
        self.unit_offset = spec.unit_offset_norms
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        normed = self.ops.rms_norm(rows, self.weight, self.eps, offset=self.unit_offset)
        return normed if x.dim() == 2 else normed.view(x.shape)


class Embedding(nn.Module):
    """Token embedding; ``weight`` is ``[vocabulary, hidden]``."""

    def __init__(self, spec: ModelSpec, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device))
        # Rounded to the type of the weights, as the models that have it were trained.
        self.scale = float(torch.tensor(spec.hidden_size**0.5).to(dtype)) if spec.scaled_embedding else None

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        x_TE = self.ops.embedding(ids_T, self.weight)
        return x_TE if self.scale is None else x_TE * self.scale


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` with gate and up in one projection; ``size`` inner dimensions."""

    def __init__(self, spec: ModelSpec, size: int, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.activate = ops.gelu_mul if spec.activation == "gelu_tanh" else ops.silu_mul
        self.gate_up = Linear(spec.hidden_size, 2 * size, ops, bias=spec.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(size, spec.hidden_size, ops, bias=spec.mlp_bias, dtype=dtype, device=device)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=1)
        return self.down(self.activate(gate_TF, up_TF))


def rope_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians a position, of each pair of a head's dimensions, in float32: ``[head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        # Wavelengths longer than the old context are stretched, short ones kept, those between interpolated.
        wavelengths = 2 * math.pi / frequencies
        turns = rope.original_max_positions / wavelengths
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = share.clamp(0.0, 1.0)
        return (1 - share) * frequencies / rope.factor + share * frequencies
    return frequencies


class RopeTable:
    """Cosines and sines of all positions, made once in float32 so that no call's shape can change their bits."""

    def __init__(self, rope: RopeSpec, spec: ModelSpec, *, device: torch.device) -> None:
        frequencies = rope_frequencies(rope, spec.head_dim)
        angles = torch.outer(torch.arange(spec.max_positions, dtype=torch.float32), frequencies)
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the given positions, ``[T, head_dim]`` each; both halves of a head turn alike."""
        cos, sin = self._cos[positions_T], self._sin[positions_T]
        return torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)
