"""Llama and everything that copies its configuration (SmolLM2, Llama 3, TinyLlama)."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.models.families.decoder_config import flag, read_common, write_common
from tandem.models.families.decoder_weights import decoder_pieces
from tandem.models.family import Family
from tandem.models.spec import ModelSpec


def _read(config: Mapping[str, object]) -> ModelSpec:
    bias = flag(config, "attention_bias")
    return ModelSpec(
        family="llama", qkv_bias=bias, out_bias=bias, mlp_bias=flag(config, "mlp_bias"), **read_common(config)
    )


def _write(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        **write_common(spec),
    }


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    pieces=decoder_pieces,
    scorer="LlamaForSequenceClassification",
    gguf_architecture="llama",
    gguf_permuted=True,
)
