"""What a model is, in our words: shapes and capabilities, no weights.

Owns: ``ModelSpec``. Refuses: names of other people's formats (that is a family's job), tensors.
Invariant: code asks a spec for a capability (``qk_norm``, ``tied_head``), never for a model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.core.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. ``llama3`` stretches the slow frequencies by ``factor`` and leaves the fast
    ones; ``linear`` divides all of them."""

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts in place of the MLP: each token goes through the ``per_token`` experts its router likes
    best. ``normalised``: their weights sum to one. ``dense_layers`` keep a plain MLP."""

    num_experts: int
    per_token: int
    intermediate_size: int
    normalised: bool = False
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: norms before (and after) each part, rotary positions, grouped-query attention,
    a gated MLP or a mixture of such."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeSpec = RopeSpec()
    tied_head: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()
    """Attention window of each layer, 0 for all earlier tokens; empty: 0 everywhere."""
    local_rope: RopeSpec | None = None
    """Rotary embedding of the layers with a window, where it differs from that of the others."""
    query_scalar: int | None = None
    """Scores are divided by the root of this; None: of ``head_dim``."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    unit_offset_norms: bool = False
    """A norm multiplies by 1 + weight, in float32, and rounds afterwards."""
    post_norms: bool = False
    """A norm on what attention and MLP give, before it is added to the residual."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of ``hidden_size``."""
    experts: ExpertSpec | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"model configuration: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model configuration: {self.num_heads} query heads do not divide into {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"model configuration: head_dim {self.head_dim} is odd, rotary positions need pairs")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelError(f"model configuration: {len(self.windows)} windows for {self.num_layers} layers")
        if self.experts and not 1 <= self.experts.per_token <= self.experts.num_experts:
            raise ModelError(
                f"model configuration: {self.experts.per_token} of {self.experts.num_experts} experts for each token"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Keys that a token of this layer sees, itself included; 0: all earlier ones."""
        return self.windows[layer] if self.windows else 0

    def mixture(self, layer: int) -> ExpertSpec | None:
        """The experts of this layer; None: it has a plain MLP."""
        return self.experts if self.experts and layer not in self.experts.dense_layers else None

    @property
    def mixtures(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.num_layers) if self.mixture(layer))

    @property
    def route_width(self) -> int:
        """Experts that a token goes through in all layers together."""
        return len(self.mixtures) * self.experts.per_token if self.experts else 0
