"""The decoder's layers as one kernel call, for serving.

Owns: which models and moments may take that road, and the packed weights it reads. Refuses: gradients, adapters,
mixtures of experts; those go through the operations one by one.
Invariant: the same bits as the modules give, so nothing but time depends on the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandem.kernels.impl.cpu.decoder import Layers, Shape, decode
from tandem.kernels.impl.cpu.whole import WHOLE
from tandem.kernels.ops import Ops
from tandem.models.attention import AttentionContext
from tandem.models.layers import Linear, Norm
from tandem.models.spec import ModelSpec

Tables = Sequence[tuple[torch.Tensor, torch.Tensor]]


class FusedLayers:
    """The layers of one model, by the names of their parts; packed anew when a weight has changed."""

    def __init__(self, spec: ModelSpec, ops: Ops, layers: Sequence[dict[str, Linear | Norm]], norm: Norm) -> None:
        self._ops = ops
        self._layers = layers
        self._norm = norm
        self._shape = Shape(
            hidden=spec.hidden_size, heads=spec.num_heads, groups=spec.num_kv_heads, size=spec.head_dim,
            mlp=spec.intermediate_size, eps=spec.norm_eps, scale=(spec.query_scalar or spec.head_dim) ** -0.5,
            offset=spec.unit_offset_norms, activation=spec.activation,
        )  # fmt: skip
        self._windows = [spec.window(number) for number in range(spec.num_layers)]
        self._possible = spec.experts is None and bool(ops.road) and self._shape.fits
        self._modules = [part for parts in layers for part in parts.values()] + [norm]
        self._linears = [module for module in self._modules if isinstance(module, Linear)]
        self.is_whole = False  # projections by weights in whole numbers of 8 bits
        self._packed: tuple[list[tuple[int, int]], Layers] | None = None

    def __getstate__(self) -> Mapping[str, object]:
        """A copy of a model packs its own weights."""
        return self.__dict__ | {"_packed": None}

    @property
    def obstacle(self) -> str:
        """Why this model never takes that road; empty: it does."""
        if not self._possible:
            return "it has experts, sizes that do not fit, or the machine no such instructions"
        if any(linear.weight.dtype is not torch.bfloat16 for linear in self._linears):
            return "its weights are not bfloat16"
        return "it has adapters" if any(linear.adapter is not None for linear in self._linears) else ""

    def takes(self, x_TE: torch.Tensor, context: AttentionContext) -> bool:
        """Whether this forward pass can go through the kernel."""
        serving = context.cache is not None and not torch.is_grad_enabled() and len(x_TE) > 0
        plain = self._possible and x_TE.dtype is torch.bfloat16 and x_TE.device.type == "cpu"
        return serving and plain and all(linear.adapter is None for linear in self._linears)

    def __call__(self, x_TE: torch.Tensor, tables: Tables, context: AttentionContext) -> torch.Tensor:
        """Hidden rows behind the last norm; new keys and values are in the cache. ``x_TE`` is written over."""
        assert context.cache is not None and context.write_slots_T is not None
        layers = self._current()
        layers.place(context.cache.keys, context.cache.values)
        keys, road = context.keys, self._ops.road | (WHOLE if self.is_whole else 0)
        index = (keys.slots_L, keys.starts_T, keys.counts_T)
        return decode(x_TE, layers, self._shape, tables, index, context.write_slots_T, road)

    def forget(self) -> None:
        """Hold no packed weights until the next call."""
        self._packed = None

    def _current(self) -> Layers:
        found = [
            (parameter._version, parameter.data_ptr())
            for module in self._modules for parameter in module._parameters.values() if parameter is not None
        ]  # fmt: skip
        if self._packed is None or self._packed[0] != found:
            parts = [self._tensors(layer) for layer in self._layers]
            local = [bool(window) for window in self._windows]
            self._packed = found, Layers(parts, self._windows, local, self._norm.weight.detach())
        return self._packed[1]

    def _tensors(self, parts: dict[str, Linear | Norm]) -> dict[str, torch.Tensor]:
        found = {}
        for name, part in parts.items():
            if isinstance(part, Linear):
                found[name] = (self._ops.whole if self.is_whole else self._ops.packed)(part.weight)
                if part.bias is not None:
                    found[f"{name}_bias"] = part.bias.detach()
            else:
                found[name] = part.weight.detach()
        return found
