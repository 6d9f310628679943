"""What a decoder's tensors are called in a GGUF file, and in which form they lie there.

Owns: names, the rotary order in which GGUF keeps q and k of some architectures, norms stored with their unit added, and
experts stacked into one tensor; each both ways. Refuses: types and bytes, which are the importer's and the exporter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tandem.core.errors import ModelError
from tandem.models.family import Family
from tandem.models.spec import ModelSpec

ROPE_FACTORS = "rope_freqs.weight"
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# With norms after each part too, files of both kinds call the one before the MLP otherwise.
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT, EXPERTS = "mlp.experts.", "_exps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of the file: ``sources`` names what it holds in a Hugging Face folder, one, or one an expert."""

    name: str
    sources: tuple[str, ...]
    stacked: bool = False

    @property
    def precise(self) -> bool:
        """Whether readers want it in float32: vectors are small anyway, a router's choice turns on small numbers."""
        return self.name.endswith(("norm.weight", ".bias", ".ffn_gate_inp.weight"))


def stored_tensors(spec: ModelSpec, family: Family) -> list[Stored]:
    """Every tensor of the file but the rotary divisors, in the order of the family's pieces.

    Raises:
        ModelError: a tensor that GGUF has no name for.
    """
    inner = INNER | POST_NORMS if spec.post_norms else INNER
    found: dict[str, list[str]] = {}
    for piece in family.pieces(spec):
        found.setdefault(_name(piece.source, inner), []).append(piece.source)
    return [
        Stored(name=name, sources=tuple(sources), stacked=f"{EXPERTS}." in name) for name, sources in found.items()
    ]


def _name(source: str, inner: dict[str, str]) -> str:
    stem, _, suffix = source.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    ending = ""
    if part.startswith(EXPERT):
        part, ending = f"mlp.{part.rpartition('.')[2]}", EXPERTS
    if part not in inner:
        raise ModelError(f"tensor {source} has no name in GGUF", hint="--format hf")
    return f"blk.{layer}.{inner[part]}{ending}.{suffix}"


def to_file(tensors: Sequence[torch.Tensor], stored: Stored, spec: ModelSpec, family: Family) -> torch.Tensor:
    """Float32 tensors of ``stored.sources`` as the file holds them."""
    if stored.stacked:
        return torch.stack(list(tensors))
    [tensor] = tensors
    if heads := _turned_heads(stored, spec, family):
        # From halves of each head (x0 x1 ... y0 y1 ...) to interleaved pairs (x0 y0 x1 y1 ...).
        return tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor + 1.0 if _shifted(stored, spec) else tensor


def from_file(tensor: torch.Tensor, stored: Stored, spec: ModelSpec, family: Family) -> Iterator[torch.Tensor]:
    """The way back: one float32 tensor for each of ``stored.sources``."""
    if stored.stacked:
        yield from (each.clone() for each in tensor)  # of its own memory: a file is written from it
    elif heads := _turned_heads(stored, spec, family):
        yield tensor.view(heads, len(tensor) // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    else:
        yield tensor - 1.0 if _shifted(stored, spec) else tensor


def _turned_heads(stored: Stored, spec: ModelSpec, family: Family) -> int:
    """Heads whose rows GGUF keeps in another order; 0: it keeps ours."""
    if not family.gguf_permuted:
        return 0
    return spec.num_heads if ".attn_q." in stored.name else spec.num_kv_heads if ".attn_k." in stored.name else 0


def _shifted(stored: Stored, spec: ModelSpec) -> bool:
    return spec.unit_offset_norms and stored.name.endswith("norm.weight")
