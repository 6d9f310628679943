"""The op table: one set of operations for sampler and trainer.

Owns: dispatch by device and capability, and the numerics switch. ``exact``: every row's bits depend on its own
inputs only, so what the sampler reports is what the trainer computes. ``fast``: stock projections without the
padding and packing that exactness needs.
Shapes: tokens are packed, T rows; S key slots; H query heads in G groups of D dimensions; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tandem.core.errors import EngineError
from tandem.kernels import functions
from tandem.kernels.impl.cpu import native, projection

# How many rows a CPU projection must have for a row to get the same bits in every batch. Measured on machines of two
# makers, with and without tile instructions (AMX); ``tests/kernels`` looks on the machine it runs on.
LEAST_ROWS = 2  # a matrix-vector product takes another road
# The library's bfloat16 kernels with tile instructions sum in an order that depends on the number of rows, but on
# nothing else. Ours (``impl/cpu/projection.c``) do not; where they cannot be built every call gets this many rows.
TILE_ROWS = 64
PACK_ROWS = 64  # above this many rows packing a bfloat16 weight gains nothing


@dataclass(frozen=True)
class KeyIndex:
    """Which keys each row attends to: row t sees, in order, ``slots_L[starts_T[t] : starts_T[t] + counts_T[t]]``."""

    slots_L: Tensor  # int32
    starts_T: Tensor  # int64
    counts_T: Tensor  # int32
    _readers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def readers(self, num_slots: int, window: int) -> tuple[Tensor, Tensor]:
        """The index turned round: the rows that list each slot (int32), in order, and where each slot's rows
        begin (int64, ``num_slots + 1``)."""
        if window not in self._readers:
            counts = self.counts_T.long()
            seen = counts.clamp(max=window) if window else counts
            rows = torch.repeat_interleave(torch.arange(len(counts)), seen)
            before = torch.cumsum(seen, 0) - seen
            places = torch.arange(len(rows)) - before[rows] + (self.starts_T + counts - seen)[rows]
            slots = self.slots_L[places].long()
            order = torch.argsort(slots, stable=True)
            starts = torch.zeros(num_slots + 1, dtype=torch.int64)
            torch.cumsum(torch.bincount(slots, minlength=num_slots), 0, out=starts[1:])
            self._readers[window] = rows[order].int(), starts
        return self._readers[window]


class Ops:
    """Operations for one device and one kind of numerics."""

    def __init__(self, numerics: str, device: torch.device | str) -> None:
        if numerics not in ("exact", "fast"):
            raise EngineError(f"unknown numerics {numerics!r}", hint="exact or fast")
        self.numerics = numerics
        self.device = torch.device(device)
        self._tiles = self.device.type == "cpu" and torch.cpu._is_amx_tile_supported()
        # The instructions of our own bfloat16 projections.
        self.road = projection.road() if self.device.type == "cpu" else projection.NONE
        # Packed copies, keyed by weight; remade when the weight has changed since.
        self._packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``."""
        rows = x_TK.shape[0]
        if self.numerics == "fast" or self.device.type != "cpu" or rows == 0:
            return F.linear(x_TK, weight_NK, bias_N)
        half = x_TK.dtype is torch.bfloat16
        if half and self.road:
            out = functions.PackedLinear.apply(x_TK, weight_NK, self._own_product)
        elif half and self._tiles:
            out = functions.PackedLinear.apply(x_TK, weight_NK, self._blocked_product)
        elif x_TK.dtype is torch.float32 or (rows <= PACK_ROWS and not torch.is_grad_enabled()):
            # The stock float32 product packs the weight anew at every call, in ways that depend on the rows.
            out = functions.PackedLinear.apply(x_TK, weight_NK, self._packed_product)
        else:  # the bits of a packed bfloat16 weight, without packing it
            padded = F.pad(x_TK, (0, 0, 0, LEAST_ROWS - rows)) if rows < LEAST_ROWS else x_TK
            out = F.linear(padded, weight_NK)[:rows]
        return out if bias_N is None else out + bias_N

    def attention(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, keys: KeyIndex, scale: float, window: int = 0
    ) -> Tensor:
        """Softmax attention of each row over the keys that ``keys`` lists for it (the last ``window`` of them, if
        it is not 0). Returns ``[T, H, D]``."""
        index = (keys.slots_L, keys.starts_T, keys.counts_T)
        num_slots = k_SGD.shape[0]
        return functions.Attention.apply(
            q_THD, k_SGD, v_SGD, index, lambda: keys.readers(num_slots, window), scale, window
        )

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: bool = False) -> Tensor:
        """``x / rms(x) * weight``, in float32 up to the rounding before the weight; with ``offset``: ``x / rms(x) *
        (1 + weight)``, in float32 to the end."""
        if native.supports(x_TD) and x_TD.dtype is weight_D.dtype and x_TD.stride(1) == 1:
            return functions.RMSNorm.apply(x_TD, weight_D, eps, offset)
        x = x_TD.float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1.0 + weight_D.float())).to(x_TD.dtype) if offset else normed.to(x_TD.dtype) * weight_D

    def silu_mul(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        if native.supports(gate_TF) and gate_TF.stride() == up_TF.stride():
            return functions.SiluMul.apply(gate_TF, up_TF)
        return F.silu(gate_TF) * up_TF

    def gelu_mul(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """``gelu(gate) * up``, the tanh form of GELU."""
        if native.supports(gate_TF) and gate_TF.stride() == up_TF.stride():
            return functions.GeluMul.apply(gate_TF, up_TF)
        return F.gelu(gate_TF, approximate="tanh") * up_TF

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding; both halves of a head turn by the same angles, float32 ``[T, D]``."""
        if native.supports(x_THD):
            return functions.Rope.apply(x_THD, cos_TD, sin_TD)
        x = x_THD.float()
        first, second = x.chunk(2, dim=2)
        turned = torch.cat((-second, first), dim=2)
        return (x * cos_TD[:, None] + turned * sin_TD[:, None]).to(x_THD.dtype)

    def logits(self, hidden_TD: Tensor, head_VD: Tensor) -> Tensor:
        """Float32 logits ``[T, V]``; the projection of sampler and trainer alike."""
        exact = self.numerics == "exact" and self.road and hidden_TD.dtype is torch.bfloat16
        if exact and not torch.is_grad_enabled():
            return projection.linear(hidden_TD, self.packed(head_VD), head_VD.shape[0], road=self.road, wide=True)
        return self.linear(hidden_TD, head_VD).float()

    def token_logprobs(
        self,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_T: Tensor,
        temperature_T: Tensor,
        chunk: int = functions.HEAD_CHUNK,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each row's target at its temperature, and the entropy, both float32
        ``[T]``. Logits exist for ``chunk`` rows at a time."""
        return functions.TokenLogprobs.apply(hidden_TD, head_VD, targets_T, temperature_T, self.logits, chunk)

    def forget_packed(self) -> None:
        """Drop the packed copies of weights; they are made again where they are needed."""
        self._packed.clear()

    def packed(self, weight_NK: Tensor) -> Tensor:
        """A bfloat16 weight as our own projections read it; made again when the weight has changed."""
        return self._packed_by(weight_NK, projection.pack)

    def _own_product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return projection.linear(x_TK, self.packed(weight_NK), weight_NK.shape[0], road=self.road)

    def _blocked_product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return torch.cat([_padded_product(x, self._reordered(weight_NK), TILE_ROWS) for x in x_TK.split(TILE_ROWS)])

    def _packed_product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return _padded_product(x_TK, self._reordered(weight_NK), LEAST_ROWS)

    def _reordered(self, weight_NK: Tensor) -> Tensor:
        """The weight in oneDNN's own layout: 1.2 to 2 times as fast for few rows."""
        return self._packed_by(
            weight_NK, lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        )

    def _packed_by(self, weight_NK: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
        state = weight_NK._version, weight_NK.data_ptr()
        kept = self._packed.get(weight_NK)
        if kept is None or kept[0] != state:
            kept = state, pack(weight_NK.detach())
            self._packed[weight_NK] = kept
        return kept[1]


def _padded_product(x_TK: Tensor, packed: Tensor, least: int) -> Tensor:
    rows = x_TK.shape[0]
    padded = F.pad(x_TK, (0, 0, 0, least - rows)) if rows < least else x_TK
    return torch.ops.mkldnn._linear_pointwise(padded, packed, None, "none", [], "")[:rows]
