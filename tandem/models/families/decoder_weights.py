"""The weight names that Llama set and other decoder families follow.

Owns: which tensor of a checkpoint is which rows of which parameter of ours. Our projections are fused where they
read the same input (q, k, v; gate, up): fewer, larger products; files keep them apart.
"""

from __future__ import annotations

from tandem.models.family import Piece
from tandem.models.spec import ModelSpec


def decoder_pieces(spec: ModelSpec) -> list[Piece]:
    """The weight names that Llama set: which tensor of a checkpoint is which rows of which parameter."""
    pieces = [_whole("embedding.weight", "model.embed_tokens.weight", spec.vocab_size)]
    for layer in range(spec.num_layers):
        pieces += _layer_pieces(spec, layer, f"layers.{layer}", f"model.layers.{layer}")
    pieces.append(_whole("norm.weight", "model.norm.weight", spec.hidden_size))
    if not spec.tied_head:
        pieces.append(_whole("head.weight", "lm_head.weight", spec.vocab_size))
    return pieces


def _layer_pieces(spec: ModelSpec, layer: int, ours: str, theirs: str) -> list[Piece]:
    qkv = (("q_proj", spec.query_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size))
    attention, mlp = f"{ours}.attention", f"{ours}.mlp"
    pieces = [
        _whole(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", spec.hidden_size),
        *_fused(f"{attention}.qkv.weight", f"{theirs}.self_attn.{{}}.weight", qkv),
        _whole(f"{attention}.out.weight", f"{theirs}.self_attn.o_proj.weight", spec.hidden_size),
        *_norms_around_mlp(spec, ours, theirs),
    ]
    if experts := spec.mixture(layer):
        pieces.append(_whole(f"{mlp}.router.weight", f"{theirs}.mlp.gate.weight", experts.num_experts))
        for expert in range(experts.num_experts):
            names = f"{mlp}.experts.{expert}", f"{theirs}.mlp.experts.{expert}"
            pieces += _mlp_pieces(spec, experts.intermediate_size, *names)
    else:
        pieces += _mlp_pieces(spec, spec.intermediate_size, mlp, f"{theirs}.mlp")
    if spec.qk_norm:
        pieces.append(_whole(f"{attention}.query_norm.weight", f"{theirs}.self_attn.q_norm.weight", spec.head_dim))
        pieces.append(_whole(f"{attention}.key_norm.weight", f"{theirs}.self_attn.k_norm.weight", spec.head_dim))
    if spec.qkv_bias:
        pieces += _fused(f"{attention}.qkv.bias", f"{theirs}.self_attn.{{}}.bias", qkv)
    if spec.out_bias:
        pieces.append(_whole(f"{attention}.out.bias", f"{theirs}.self_attn.o_proj.bias", spec.hidden_size))
    return pieces


def _norms_around_mlp(spec: ModelSpec, ours: str, theirs: str) -> list[Piece]:
    """With norms after each part too, files call the one before the MLP by another name."""
    names = {"mlp_norm": "post_attention_layernorm"}
    if spec.post_norms:
        names = {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    size = spec.hidden_size
    return [_whole(f"{ours}.{one}.weight", f"{theirs}.{other}.weight", size) for one, other in names.items()]


def _mlp_pieces(spec: ModelSpec, size: int, ours: str, theirs: str) -> list[Piece]:
    gate_up = (("gate_proj", size), ("up_proj", size))
    pieces = _fused(f"{ours}.gate_up.weight", f"{theirs}.{{}}.weight", gate_up)
    pieces.append(_whole(f"{ours}.down.weight", f"{theirs}.down_proj.weight", spec.hidden_size))
    if spec.mlp_bias:
        pieces += _fused(f"{ours}.gate_up.bias", f"{theirs}.{{}}.bias", gate_up)
        pieces.append(_whole(f"{ours}.down.bias", f"{theirs}.down_proj.bias", spec.hidden_size))
    return pieces


def _whole(parameter: str, source: str, rows: int) -> Piece:
    return Piece(parameter=parameter, source=source, start=0, stop=rows)


def _fused(parameter: str, source: str, parts: tuple[tuple[str, int], ...]) -> list[Piece]:
    pieces, start = [], 0
    for part, rows in parts:
        pieces.append(Piece(parameter=parameter, source=source.format(part), start=start, stop=start + rows))
        start += rows
    return pieces
