"""The fields that Hugging Face configurations of decoder models have in common, both ways.

Owns: reading them strictly (a missing or mistyped field is an error that names it), and rotary scaling in its
old and new spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tandem.core.errors import ModelError
from tandem.models.spec import ModelSpec, RopeSpec

N = TypeVar("N", int, float)


def number(config: Mapping[str, object], name: str, kind: type[N], default: N | None = None) -> N:
    """A required (or defaulted) number of the configuration."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"model configuration: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise ModelError(f"model configuration: {name} is {value!r}, expected {kind.__name__}")
    return kind(value)


def flag(config: Mapping[str, object], name: str, default: bool = False) -> bool:
    """A boolean that is ``default`` where it is not given."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"model configuration: {name} is {value!r}, expected true or false")
    return default if value is None else value


def read_rope(config: Mapping[str, object]) -> RopeSpec:
    """Rotary embedding from ``rope_parameters`` (new) or ``rope_theta`` and ``rope_scaling`` (old)."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise ModelError(f"model configuration: rope_scaling is {nested!r}, expected an object")
    kind = nested.get("rope_type", nested.get("type", "default"))
    theta = number(nested, "rope_theta", float, number(config, "rope_theta", float, 10000.0))
    if number(config, "partial_rotary_factor", float, number(nested, "partial_rotary_factor", float, 1.0)) != 1.0:
        raise ModelError("model configuration: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=number(nested, "factor", float))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            scaling="llama3",
            factor=number(nested, "factor", float),
            low_freq_factor=number(nested, "low_freq_factor", float),
            high_freq_factor=number(nested, "high_freq_factor", float),
            original_max_positions=number(nested, "original_max_position_embeddings", int),
        )
    raise ModelError(f"model configuration: rope type {kind!r} is not supported", hint="default, linear or llama3")


def write_rope(rope: RopeSpec) -> dict[str, object]:
    """The old spelling, which every version of the library reads."""
    scaling: dict[str, object] | None = None
    if rope.scaling != "default":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        assert scaling is not None
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def read_windows(kinds: object, size: int) -> tuple[int, ...]:
    """The window of each layer: ``kinds`` is its ``layer_types``, ``size`` that of the sliding ones."""
    if not isinstance(kinds, list) or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelError(f"model configuration: layer_types {kinds!r} is not supported")
    return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)


def layer_types(spec: ModelSpec) -> list[str]:
    """The other way round."""
    return ["sliding_attention" if spec.window(layer) else "full_attention" for layer in range(spec.num_layers)]


def read_common(
    config: Mapping[str, object], *, activation: str = "silu", activation_field: str = "hidden_act",
    rope: RopeSpec | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keyword arguments of ``ModelSpec`` that do not depend on the family. ``activation`` is the one that the
    family has; ``rope`` is given where a family writes it in a way of its own."""
    if (found := config.get(activation_field, activation)) != activation:
        raise ModelError(f"model configuration: {activation_field} {found!r} is not supported", hint=activation)
    if config.get("quantization_config") is not None:
        raise ModelError(
            "model configuration: the weights are quantised, which can not be trained",
            hint="use a folder with bfloat16, float16 or float32 weights, or a .gguf file, which is de-quantised",
        )
    heads = number(config, "num_attention_heads", int)
    eos = config.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return {
        "vocab_size": number(config, "vocab_size", int),
        "hidden_size": number(config, "hidden_size", int),
        "num_layers": number(config, "num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": number(config, "num_key_value_heads", int, heads),
        "head_dim": number(config, "head_dim", int, number(config, "hidden_size", int) // max(heads, 1)),
        "intermediate_size": number(config, "intermediate_size", int),
        "max_positions": number(config, "max_position_embeddings", int, 2048),
        "norm_eps": number(config, "rms_norm_eps", float, 1e-6),
        "rope": rope or read_rope(config),
        "tied_head": flag(config, "tie_word_embeddings"),
        "bos_id": config.get("bos_token_id"),
        "eos_ids": tuple(eos_ids),
        "pad_id": config.get("pad_token_id"),
    }


def write_common(spec: ModelSpec) -> dict[str, object]:
    """The configuration fields that do not depend on the family."""
    eos = spec.eos_ids[0] if len(spec.eos_ids) == 1 else list(spec.eos_ids) or None
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        **write_rope(spec.rope),
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_head,
        "bos_token_id": spec.bos_id,
        "eos_token_id": eos,
        "pad_token_id": spec.pad_id,
        "use_cache": True,
    }
