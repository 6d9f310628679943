"""Gemma 3, text only: sliding windows with a rotary base of their own on most layers, norms around each part whose
weight is an offset from one, a scaled embedding, GELU."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.errors import ModelError
from tandem.models.families.decoder_config import (
    flag,
    layer_types,
    number,
    read_common,
    read_rope,
    read_windows,
    write_common,
)
from tandem.models.families.decoder_weights import decoder_pieces
from tandem.models.family import Family
from tandem.models.spec import ModelSpec, RopeSpec

THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
UNSUPPORTED = ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")


def _ropes(config: Mapping[str, object]) -> tuple[RopeSpec, RopeSpec]:
    """Of the layers that see everything and of those with a window, in the new and the old spelling."""
    nested = config.get("rope_parameters")
    if isinstance(nested, dict) and ("full_attention" in nested or "sliding_attention" in nested):
        everywhere, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
        return (
            read_rope({"rope_theta": THETA, "rope_parameters": everywhere}),
            read_rope({"rope_theta": LOCAL_THETA, "rope_parameters": local}),
        )
    old = {"rope_theta": number(config, "rope_theta", float, THETA), "rope_scaling": config.get("rope_scaling")}
    return read_rope(old), RopeSpec(theta=number(config, "rope_local_base_freq", float, LOCAL_THETA))


def _read(config: Mapping[str, object]) -> ModelSpec:
    for name in UNSUPPORTED:
        if config.get(name):
            raise ModelError(f"model configuration: {name} {config[name]!r} is not supported")
    bias = flag(config, "attention_bias")
    everywhere, local = _ropes(config)
    common = read_common(
        config, activation="gelu_pytorch_tanh", activation_field="hidden_activation", rope=everywhere
    )
    # The family's defaults: the library leaves out what equals them.
    common["head_dim"] = number(config, "head_dim", int, 256)
    common["tied_head"] = flag(config, "tie_word_embeddings", True)
    kinds = config.get("layer_types")
    if kinds is None:
        every = number(config, "sliding_window_pattern", int, 6)
        kinds = [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(common["num_layers"])
        ]
    return ModelSpec(
        family="gemma3_text",
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        windows=read_windows(kinds, number(config, "sliding_window", int, 4096)),
        local_rope=local,
        query_scalar=number(config, "query_pre_attn_scalar", int, 256),
        activation="gelu_tanh",
        unit_offset_norms=True,
        post_norms=True,
        scaled_embedding=True,
        **common,
    )


def _write(spec: ModelSpec) -> dict[str, object]:
    config = write_common(spec)
    del config["hidden_act"]
    assert spec.local_rope is not None
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": spec.qkv_bias,
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": spec.local_rope.theta,
        "query_pre_attn_scalar": spec.query_scalar,
        "sliding_window": max(spec.windows) or 4096,
        "layer_types": layer_types(spec),
    }


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    pieces=decoder_pieces,
    scorer="Gemma3TextForSequenceClassification",
    gguf_architecture="gemma3",
    gguf_windows=True,
)
