"""Qwen3 with a mixture of experts in place of the MLP, on all layers or some."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.errors import ModelError
from tandem.models.families.decoder_config import flag, number, read_common, write_common
from tandem.models.families.decoder_weights import decoder_pieces
from tandem.models.family import Family
from tandem.models.spec import ExpertSpec, ModelSpec


def _experts(config: Mapping[str, object], num_layers: int) -> ExpertSpec:
    step = number(config, "decoder_sparse_step", int, 1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain) or step < 1:
        raise ModelError(f"model configuration: mlp_only_layers {plain!r}, decoder_sparse_step {step} not supported")
    total = config.get("num_experts", config.get("num_local_experts"))  # the library has written both names
    return ExpertSpec(
        num_experts=number({"num_experts": total}, "num_experts", int),
        per_token=number(config, "num_experts_per_tok", int),
        intermediate_size=number(config, "moe_intermediate_size", int),
        normalised=flag(config, "norm_topk_prob"),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in plain or (layer + 1) % step),
    )


def _read(config: Mapping[str, object]) -> ModelSpec:
    if flag(config, "use_sliding_window"):
        raise ModelError("model configuration: use_sliding_window is not supported for qwen3_moe")
    bias = flag(config, "attention_bias")
    common = read_common(config)
    experts = _experts(config, common["num_layers"])
    return ModelSpec(family="qwen3_moe", qk_norm=True, qkv_bias=bias, out_bias=bias, experts=experts, **common)


def _write(spec: ModelSpec) -> dict[str, object]:
    experts = spec.experts
    assert experts is not None
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": spec.qkv_bias,
        **write_common(spec),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
        "use_sliding_window": False,
    }


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    pieces=decoder_pieces,
    scorer="Qwen3MoeForSequenceClassification",
    gguf_architecture="qwen3moe",
)
