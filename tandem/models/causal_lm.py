"""The decoder: one definition that the trainer differentiates and the engine serves.

Owns: the order of layers. Refuses: logits and losses (``Ops`` projects hidden rows), sampling, padding.
Invariants: tokens are packed ``[T]``; every row's result depends on its own ids, positions and keys only.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from tandem.core.errors import ModelError
from tandem.kernels.ops import Ops
from tandem.models.attention import Attention, AttentionContext
from tandem.models.experts import Mixture
from tandem.models.fused import FusedLayers
from tandem.models.layers import Embedding, GatedMLP, Linear, Norm, RopeTable
from tandem.models.spec import ModelSpec


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each behind its norm and around its residual."""

    def __init__(self, spec: ModelSpec, layer: int, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def norm() -> Norm:
            return Norm(spec.hidden_size, spec, ops, dtype=dtype, device=device)

        self.attention_norm = norm()
        self.attention = Attention(spec, layer, ops, dtype=dtype, device=device)
        self.attention_post_norm = norm() if spec.post_norms else nn.Identity()
        self.mlp_norm = norm()
        if spec.mixture(layer) is None:
            self.mlp = GatedMLP(spec, spec.intermediate_size, ops, dtype=dtype, device=device)
        else:
            self.mlp = Mixture(spec, layer, ops, dtype=dtype, device=device)
        self.mlp_post_norm = norm() if spec.post_norms else nn.Identity()

    def parts(self) -> dict[str, Linear | Norm]:
        """Projections and norms, by the names that ``kernels.impl.cpu.decoder`` knows; without a mixture's."""
        attention = self.attention
        found: dict[str, nn.Module] = {
            "attention_norm": self.attention_norm, "qkv": attention.qkv, "out": attention.out,
            "attention_post": self.attention_post_norm, "mlp_norm": self.mlp_norm, "mlp_post": self.mlp_post_norm,
        }  # fmt: skip
        if attention.spec.qk_norm:
            found |= {"query_norm": attention.query_norm, "key_norm": attention.key_norm}
        if isinstance(self.mlp, GatedMLP):
            found |= {"gate_up": self.mlp.gate_up, "down": self.mlp.down}
        return {name: part for name, part in found.items() if isinstance(part, Linear | Norm)}

    def forward(
        self, x_TE: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        attended_TE = self.attention(self.attention_norm(x_TE), cos_TD, sin_TD, context)
        x_TE = x_TE + self.attention_post_norm(attended_TE)
        normed_TE = self.mlp_norm(x_TE)
        is_mixture = isinstance(self.mlp, Mixture)
        made_TE = self.mlp(normed_TE, context.routes) if is_mixture else self.mlp(normed_TE)
        return x_TE + self.mlp_post_norm(made_TE)


class CausalLM(nn.Module):
    """A decoder-only language model. Made with empty parameters: ``models.loader`` fills them."""

    def __init__(self, spec: ModelSpec, ops: Ops, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.ops = ops
        self.embedding = Embedding(spec, ops, dtype=dtype, device=device)
        layers = [DecoderLayer(spec, layer, ops, dtype=dtype, device=device) for layer in range(spec.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(spec.hidden_size, spec, ops, dtype=dtype, device=device)
        if not spec.tied_head:
            self.head = Linear(spec.hidden_size, spec.vocab_size, ops, bias=False, dtype=dtype, device=device)
        self._fused = FusedLayers(spec, ops, [layer.parts() for layer in layers], self.norm)
        self._rope = RopeTable(spec.rope, spec, device=device)
        self._local_rope = RopeTable(spec.local_rope, spec, device=device) if spec.local_rope else self._rope

    @property
    def head_weight(self) -> torch.Tensor:
        """The output projection ``[vocabulary, hidden]``; the embedding itself where the head is tied."""
        return self.embedding.weight if self.spec.tied_head else self.head.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def packable(self) -> dict[str, nn.Parameter]:
        """The weights that are served from packed copies, by name: projections, and the head, which may be the
        embedding."""
        routers = {id(module.router) for module in self.modules() if isinstance(module, Mixture)}
        found = {
            f"{name}.weight": module.weight
            for name, module in self.named_modules()
            if isinstance(module, Linear) and id(module) not in routers
        }
        if self.spec.tied_head:
            found["embedding.weight"] = self.embedding.weight
        held = self.ops.quantised.is_held
        return {name: weight for name, weight in found.items() if self.ops.packs(weight) and not held(weight)}

    def hold_packed(self) -> None:
        """Keep each weight as the kernels read it and nowhere else: half the memory, for who neither trains nor saves
        this model. Weights that a dense layout is read of (those under adapters) stay."""
        adapted = [name for name, module in self.named_modules() if isinstance(module, Linear) and module.adapter]
        for name, weight in self.packable().items():
            if not any(name.startswith(f"{each}.") for each in adapted):
                self.ops.packing.hold_in_place(weight)

    @property
    def is_quantised(self) -> bool:
        """Whether it is served by weights in whole numbers of 8 bits; training is not."""
        return self._fused.is_whole

    def quantise(self, *, is_alone: bool = False) -> None:
        """Serve by weights in whole numbers of 8 bits, made of the live ones. ``is_alone``: nobody trains or saves the
        model, so projections are kept in these only.

        Raises:
            ModelError: the model, or the machine, cannot.
        """
        if (why := self._fused.obstacle) or not self.ops.packs(self.head_weight):
            raise ModelError(
                f"this model cannot be served in 8 bits: {why or 'numerics are not exact, or it is not on the CPU'}",
                hint='set engine.quantize = "none"',
            )
        self._fused.is_whole = True
        self._fused.forget()
        if is_alone:
            for name, weight in self.packable().items():
                if name != "embedding.weight":  # its rows are read as they are
                    self.ops.quantised.hold_in_place(weight)

    def logits(self, hidden_TE: torch.Tensor, room_MV: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits ``[T, vocabulary]`` of what is served; they may lie in ``room_MV`` (``Ops.logits``)."""
        if self.is_quantised:
            return self.ops.whole_logits(hidden_TE, self.head_weight)
        return self.ops.logits(hidden_TE, self.head_weight, room_MV)

    def forget_packed(self) -> None:
        """Drop the packed copies of weights; they are made again where they are needed."""
        self._fused.forget()
        self.ops.forget_packed()

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        context: AttentionContext,
        checkpoint: bool = False,
    ) -> torch.Tensor:
        """Hidden rows after the final norm, ``[T, hidden]``. With ``checkpoint`` the backward pass recomputes
        each layer from its input instead of keeping its activations."""
        x_TE = self.embedding(ids_T)
        everywhere = self._rope.at(positions_T)
        local = self._local_rope.at(positions_T) if self.spec.local_rope else everywhere
        if self._fused.takes(x_TE, context):
            return self._fused(x_TE, (everywhere, local), context)
        assert context.cache is None or not self.is_quantised, "a quantised model is served by the fused layers alone"
        for number, layer in enumerate(self.layers):
            cos_TD, sin_TD = local if self.spec.window(number) else everywhere
            if checkpoint and torch.is_grad_enabled():
                x_TE = recompute(layer, x_TE, cos_TD, sin_TD, context, use_reentrant=False)
            else:
                x_TE = layer(x_TE, cos_TD, sin_TD, context)
        return self.norm(x_TE)
