"""Attention with one face for training and inference.

Owns: where keys and values come from. Training: the packed batch's own tokens (``cache`` None). Inference: the
new tokens' keys and values are written into their cache slots first, then all rows read the cache in place.
Invariant: which keys a row sees, and in which order, is the caller's ``KeyIndex`` alone, so a row gets the same
bits on both roads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tandem.core.routes import MISSING
from tandem.kernels.ops import KeyIndex, Ops
from tandem.kernels.pages import zeros
from tandem.models.layers import Linear, Norm
from tandem.models.routes import Settles
from tandem.models.spec import ModelSpec


class KVCache:
    """Keys and values of all layers: one tensor ``[num_slots, kv heads, head dim]`` each a layer."""

    def __init__(
        self, spec: ModelSpec, num_slots: int, *, dtype: torch.dtype, device: torch.device | str, routes: bool = False
    ) -> None:
        """``routes``: room for the experts of each token, too (``[num_slots, spec.route_width]``, int16)."""
        shape = (num_slots, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: rows of unused slots may be read ahead by a kernel, never used, but must not be NaN.
        both = [zeros(shape, dtype=dtype, device=torch.device(device)) for _ in range(2 * spec.num_layers)]
        self.keys, self.values = both[::2], both[1::2]
        self.routes = (
            torch.full((num_slots, spec.route_width), MISSING, dtype=torch.int16, device=device) if routes else None
        )
        self.num_slots = num_slots

    def write(self, layer: int, slots_T: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> None:
        """Put the new tokens' keys and values into their slots."""
        self.keys[layer].index_copy_(0, slots_T, k_TGD)
        self.values[layer].index_copy_(0, slots_T, v_TGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What one forward pass attends to. With a ``cache``, ``write_slots_T`` says where each token's k, v go and
    ``keys`` numbers cache slots; without, ``keys`` numbers tokens of the batch."""

    keys: KeyIndex
    cache: KVCache | None = None
    write_slots_T: torch.Tensor | None = None
    routes: Settles | None = None  # where the experts of each token are noted, or given


class Attention(nn.Module):
    """Grouped-query attention with a fused q, k, v projection."""

    def __init__(self, spec: ModelSpec, layer: int, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.ops = ops
        self.spec = spec
        self.window = spec.window(layer)
        self.scale = (spec.query_scalar or spec.head_dim) ** -0.5
        place = {"dtype": dtype, "device": device}
        self.qkv = Linear(spec.hidden_size, spec.query_size + 2 * spec.kv_size, ops, bias=spec.qkv_bias, **place)
        self.out = Linear(spec.query_size, spec.hidden_size, ops, bias=spec.out_bias, **place)
        if spec.qk_norm:
            self.query_norm = Norm(spec.head_dim, spec, ops, **place)
            self.key_norm = Norm(spec.head_dim, spec, ops, **place)

    def forward(
        self, x_TE: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        spec, num_tokens = self.spec, x_TE.shape[0]
        q, k, v = self.qkv(x_TE).split((spec.query_size, spec.kv_size, spec.kv_size), dim=1)
        q_THD = q.reshape(num_tokens, spec.num_heads, spec.head_dim)
        k_TGD = k.reshape(num_tokens, spec.num_kv_heads, spec.head_dim)
        v_TGD = v.reshape(num_tokens, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q_THD, k_TGD = self.query_norm(q_THD), self.key_norm(k_TGD)
        q_THD = self.ops.rope(q_THD, cos_TD, sin_TD)
        k_TGD = self.ops.rope(k_TGD, cos_TD, sin_TD)
        if context.cache is None:
            k_SGD, v_SGD = k_TGD, v_TGD
        else:
            assert context.write_slots_T is not None
            context.cache.write(self.layer, context.write_slots_T, k_TGD, v_TGD)
            k_SGD, v_SGD = context.cache.keys[self.layer], context.cache.values[self.layer]
        out_THD = self.ops.attention(q_THD, k_SGD, v_SGD, context.keys, self.scale, self.window)
        return self.out(out_THD.reshape(num_tokens, spec.query_size))
