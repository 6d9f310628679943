"""The op table: one set of operations for sampler and trainer.

Owns: dispatch by device and capability, and the numerics switch. ``exact``: every row's bits depend on its own
inputs only, so what the sampler reports is what the trainer computes. ``fast``: stock projections without the
padding and packing that exactness needs. Tensors on the CPU go to the C kernels where those take them, all others to
PyTorch's own operations (``impl.portable``), which follow the device of their tensors.
Shapes: tokens are packed, T rows; S key slots; H query heads in G groups of D dimensions; V vocabulary.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels import functions
from tandem.kernels.impl.cpu import native, projection, whole
from tandem.kernels.impl.portable import rows as portable_rows
from tandem.kernels.impl.portable.products import has_bfloat16
from tandem.kernels.keys import KeyIndex
from tandem.kernels.packing import Packing

# How many rows a CPU projection must have for a row to get the same bits in every batch. Measured on machines of two
# makers, with and without tile instructions (AMX); ``tests/kernels`` looks on the machine it runs on.
LEAST_ROWS = 2  # a matrix-vector product takes another road
# The library's bfloat16 kernels with tile instructions sum in an order that depends on the number of rows, but on
# nothing else. Ours (``impl/cpu/projection.c``) do not; where they cannot be built every call gets this many rows, and
# where the library has no bfloat16 kernels for the processor either, the portable operations serve.
TILE_ROWS = 64
PACK_ROWS = 64  # above this many rows packing a bfloat16 weight gains nothing


class Ops:
    """Operations for one device and one kind of numerics."""

    def __init__(self, numerics: str, device: torch.device | str, *, portable: bool | None = None) -> None:
        """``portable``: take the operations that run everywhere; unset, on every device but the CPU.

        Raises:
            EngineError: there are no such numerics, or only portable operations for this device.
        """
        if numerics not in ("exact", "fast"):
            raise EngineError(f"unknown numerics {numerics!r}", hint="exact or fast")
        self.numerics = numerics
        self.device = torch.device(device)
        self.portable = self.device.type != "cpu" if portable is None else portable
        if not self.portable and self.device.type != "cpu":
            raise EngineError(f"there are no kernels of our own for {self.device.type}", hint="portable=True")
        self._tiles = not self.portable and torch.cpu._is_amx_tile_supported()
        # The instructions of our own bfloat16 projections.
        self.road = projection.NONE if self.portable else projection.road()
        self.packing = Packing()
        self.quantised = Packing(whole, torch.uint8)  # for serving in whole numbers of 8 bits

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``."""
        rows = x_TK.shape[0]
        if self.numerics == "fast" or rows == 0:
            return F.linear(x_TK, weight_NK, bias_N)
        half = x_TK.dtype is torch.bfloat16
        if self.portable or (half and not self.road and not has_bfloat16()):
            out = functions.PackedLinear.apply(x_TK, weight_NK, portable_rows.product)
        elif half and self.road:
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
        portable = self.portable or not native.supports(q_THD, q_THD.shape[2])
        return functions.Attention.apply(q_THD, k_SGD, v_SGD, keys, scale, window, portable)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: bool = False) -> Tensor:
        """``x / rms(x) * weight``, in float32 up to the rounding before the weight; with ``offset``: ``x / rms(x) *
        (1 + weight)``, in float32 to the end."""
        plain = x_TD.dtype is weight_D.dtype and x_TD.stride(1) == 1
        return functions.RMSNorm.apply(x_TD, weight_D, eps, offset, self._rows(x_TD, plain))

    def silu_mul(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        return functions.SiluMul.apply(gate_TF, up_TF, self._rows(gate_TF, gate_TF.stride() == up_TF.stride()))

    def gelu_mul(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """``gelu(gate) * up``, the tanh form of GELU."""
        return functions.GeluMul.apply(gate_TF, up_TF, self._rows(gate_TF, gate_TF.stride() == up_TF.stride()))

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding; both halves of a head turn by the same angles, float32 ``[T, D]``."""
        return functions.Rope.apply(x_THD, cos_TD, sin_TD, self._rows(x_THD, True))

    def _rows(self, x: Tensor, plain: bool) -> ModuleType:
        """The operations on such rows; ``plain``: they lie as the C kernels read them."""
        return native if not self.portable and plain and native.supports(x) else portable_rows

    def logits(self, hidden_TD: Tensor, head_VD: Tensor, room_MV: Tensor | None = None) -> Tensor:
        """Float32 logits ``[T, V]``; the projection of sampler and trainer alike. Without gradients they may lie in
        ``room_MV``, float32, of at least T rows: fresh memory costs more than a product of few rows."""
        exact = self.numerics == "exact" and self.road and hidden_TD.dtype is torch.bfloat16
        if exact and not torch.is_grad_enabled():
            out_TV = None if room_MV is None else room_MV[: len(hidden_TD)]
            packed = self.packed(head_VD)
            return projection.linear(hidden_TD, packed, len(head_VD), road=self.road, wide=True, out_TN=out_TV)
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
        return functions.TokenLogprobs.apply(
            hidden_TD, head_VD, targets_T, temperature_T, self.logits, chunk, self.portable
        )

    def forget_packed(self) -> None:
        """Drop the packed copies of weights; they are made again where they are needed."""
        self.packing.forget()
        self.quantised.forget()

    def packs(self, weight_NK: Tensor) -> bool:
        """Whether our own projections serve this weight, from a packed copy."""
        fits = weight_NK.dtype is torch.bfloat16 and weight_NK.dim() == 2 and weight_NK.device.type == "cpu"
        return fits and self.numerics == "exact" and bool(self.road)

    def packed(self, weight_NK: Tensor) -> Tensor:
        """A bfloat16 weight as our own projections read it; made again when the weight has changed."""
        return self.packing.of(weight_NK, projection.pack)

    def whole(self, weight_NK: Tensor) -> Tensor:
        """A bfloat16 weight in whole numbers of 8 bits; made again when the weight has changed."""
        return self.quantised.of(weight_NK, whole.pack)

    def whole_logits(self, hidden_TD: Tensor, head_VD: Tensor) -> Tensor:
        """Float32 logits ``[T, V]`` of the head in whole numbers of 8 bits."""
        return whole.linear(hidden_TD, self.whole(head_VD), head_VD.shape[0], road=self.road, wide=True)

    def embedding(self, ids_T: Tensor, weight_VE: Tensor) -> Tensor:
        """Rows of a table, in whatever layout it is held."""
        if self.packing.is_held(weight_VE):
            return projection.rows_of(self.packed(weight_VE), ids_T, weight_VE.shape[1])
        return F.embedding(ids_T, weight_VE)

    def _own_product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return projection.linear(x_TK, self.packed(weight_NK), weight_NK.shape[0], road=self.road)

    def _blocked_product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return torch.cat([_padded_product(x, self._reordered(weight_NK), TILE_ROWS) for x in x_TK.split(TILE_ROWS)])

    def _packed_product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return _padded_product(x_TK, self._reordered(weight_NK), LEAST_ROWS)

    def _reordered(self, weight_NK: Tensor) -> Tensor:
        """The weight in oneDNN's own layout: 1.2 to 2 times as fast for few rows."""
        return self.packing.of(weight_NK, lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS))


def _padded_product(x_TK: Tensor, packed: Tensor, least: int) -> Tensor:
    rows = x_TK.shape[0]
    padded = F.pad(x_TK, (0, 0, 0, least - rows)) if rows < least else x_TK
    return torch.ops.mkldnn._linear_pointwise(padded, packed, None, "none", [], "")[:rows]
