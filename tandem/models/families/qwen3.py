"""Qwen3, dense: Llama with a norm on each query and key head, and optional sliding windows."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.models.families.decoder_config import flag, layer_types, number, read_common, read_windows, write_common
from tandem.models.families.decoder_weights import decoder_pieces
from tandem.models.family import Family
from tandem.models.spec import ModelSpec


def _windows(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    if not flag(config, "use_sliding_window"):
        return ()
    size = number(config, "sliding_window", int, 4096)
    kinds = config.get("layer_types")
    if kinds is None:
        first = number(config, "max_window_layers", int, 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return read_windows(kinds, size)


def _read(config: Mapping[str, object]) -> ModelSpec:
    bias = flag(config, "attention_bias")
    common = read_common(config)
    common["head_dim"] = number(config, "head_dim", int, 128)  # the family's default; not hidden / heads
    windows = _windows(config, number(config, "num_hidden_layers", int))
    return ModelSpec(family="qwen3", qk_norm=True, qkv_bias=bias, out_bias=bias, windows=windows, **common)


def _write(spec: ModelSpec) -> dict[str, object]:
    sliding = any(spec.windows)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": spec.qkv_bias,
        **write_common(spec),
        "use_sliding_window": sliding,
        "sliding_window": max(spec.windows) if sliding else None,
        "layer_types": layer_types(spec),
    }


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read,
    write=_write,
    pieces=decoder_pieces,
    scorer="Qwen3ForSequenceClassification",
    gguf_architecture="qwen3",
)
