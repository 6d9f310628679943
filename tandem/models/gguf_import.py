"""GGUF files in: de-quantised once into a Hugging Face folder.

Owns: the metadata that becomes a configuration. The result is the model the file really holds: de-quantised 4-bit
weights stay de-quantised 4-bit weights.
Refuses: architectures no family claims, tensors it does not know (by name), a window list of another length than the
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize

from tandem.core.errors import ModelError, boundary
from tandem.models.families.decoder_config import write_rope
from tandem.models.family import Family, families
from tandem.models.gguf_names import ROPE_FACTORS, Stored, from_file, stored_tensors
from tandem.models.layers import rope_frequencies
from tandem.models.saver import write_config, write_tensors
from tandem.models.spec import ModelSpec, RopeSpec
from tandem.text.tokenizer import save_gguf_tokenizer

EVERY, LOCAL_THETA = 6, 10000.0  # what readers take where a file with windows does not say it
LARGEST = 62  # layers of the one model of its family whose scores are divided by another number


def import_gguf(file: str | Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> ModelSpec:
    """Fill the existing, empty ``folder`` with the model, tokenizer and chat template of ``file``.

    Raises:
        ModelError: not a GGUF file, an unsupported architecture, or a tensor without a place.
    """
    file = Path(file)
    if not file.is_file():
        raise ModelError(f"model file not found: {file}")
    with boundary(ModelError, f"{file} is not a readable GGUF file"):
        reader = GGUFReader(file)
    metadata = _Metadata(file, reader)
    family = _find_family(metadata)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    spec = _read_spec(metadata, family, tensors)
    stored = stored_tensors(spec, family)
    wanted, found = {each.name for each in stored}, set(tensors) - {ROPE_FACTORS}
    for what, lost in (("lacks", wanted - found), ("has no place for", found - wanted)):
        if lost:
            raise ModelError(f"{file} {what} {', '.join(sorted(lost)[:5])}")
    write_config(spec, folder, dtype=dtype)
    write_tensors(_convert(spec, family, stored, tensors, dtype), folder)
    save_gguf_tokenizer(file, folder)
    return spec


class _Metadata:
    """Typed look-ups in the key-value part of a GGUF file."""

    def __init__(self, file: Path, reader: GGUFReader) -> None:
        self.file = file
        self._fields = reader.fields

    def get(self, key: str) -> object:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float):
            raise ModelError(f"{self.file}: metadata {key} is {value!r}, expected a number")
        return value

    def token_id(self, name: str) -> int | None:
        value = self.get(f"tokenizer.ggml.{name}_token_id")
        return int(value) if isinstance(value, int) else None


def _find_family(metadata: _Metadata) -> Family:
    architecture = metadata.get("general.architecture")
    known = []
    for name in families().names():
        family = families().resolve(name)
        if isinstance(family, Family) and family.gguf_architecture:
            if family.gguf_architecture == architecture:
                return family
            known.append(family.gguf_architecture)
    raise ModelError(
        f"{metadata.file}: GGUF architecture {architecture!r} is not supported", hint=f"supported: {', '.join(known)}"
    )


def _read_spec(metadata: _Metadata, family: Family, tensors: dict[str, ReaderTensor]) -> ModelSpec:
    """By way of a configuration, so that the family's own rules and defaults hold."""
    prefix = family.gguf_architecture

    def count(key: str, default: int | None = None) -> int:
        return int(metadata.number(f"{prefix}.{key}", default))

    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    if count("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{metadata.file}: rotary embedding of a part of each head is not supported")
    ends = [found for name in ("eos", "eot") if (found := metadata.token_id(name)) is not None]
    layers = count("block_count")
    config: dict[str, object] = {
        "model_type": family.name,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": count("feed_forward_length"),
        "max_position_embeddings": count("context_length"),
        # Stored as float32; its shortest decimal form is the number that was meant.
        "rms_norm_eps": float(str(np.float32(metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")))),
        **write_rope(_read_rope(metadata, prefix, head_dim, tensors.get(ROPE_FACTORS))),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": list(dict.fromkeys(ends)),
        "pad_token_id": metadata.token_id("padding"),
        # Readers know it: the file does not say it.
        "query_pre_attn_scalar": hidden // heads if layers == LARGEST else head_dim,
    }
    if window := count("attention.sliding_window", 0):
        config |= {
            "sliding_window": window,
            "layer_types": _layer_types(metadata.get(f"{prefix}.attention.sliding_window_pattern"), layers),
            "rope_local_base_freq": metadata.number(f"{prefix}.rope.freq_base_swa", LOCAL_THETA),
        }
    if experts := count("expert_count", 0):
        used = count("expert_used_count")
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": used,
            "moe_intermediate_size": count("expert_feed_forward_length", count("feed_forward_length") // used),
            "norm_topk_prob": True,  # as all readers do
        }
    return family.read(config)


def _layer_types(pattern: object, num_layers: int) -> list[str]:
    """Which layers have a window: the file says it layer by layer, or that every so many have none."""
    if isinstance(pattern, list):
        local = [bool(each) for each in pattern]
    else:
        every = pattern if isinstance(pattern, int) else EVERY
        local = [bool((layer + 1) % every) for layer in range(num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in local]


def _read_rope(metadata: _Metadata, prefix: str, head_dim: int, factors: ReaderTensor | None) -> RopeSpec:
    theta = metadata.number(f"{prefix}.rope.freq_base", 10000.0)
    kind = metadata.get(f"{prefix}.rope.scaling.type") or "none"
    if factors is not None:
        # GGUF stores the llama3 rule as its result, one divisor a frequency. Find the rule again, and check it.
        divisors = torch.from_numpy(np.array(factors.data, dtype=np.float32))
        rope = RopeSpec(theta=theta, scaling="llama3", factor=float(divisors.max()))
        plain = rope_frequencies(RopeSpec(theta=theta), head_dim)
        if divisors.shape != plain.shape or not torch.allclose(
            rope_frequencies(rope, head_dim), plain / divisors, rtol=1e-4
        ):
            raise ModelError(f"{metadata.file}: {ROPE_FACTORS} does not follow the llama3 rule, which is supported")
        return rope
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=metadata.number(f"{prefix}.rope.scaling.factor"))
    if kind != "none":
        raise ModelError(f"{metadata.file}: rope scaling {kind!r} is not supported", hint="none, linear or llama3")
    return RopeSpec(theta=theta)


def _convert(
    spec: ModelSpec, family: Family, stored: list[Stored], tensors: dict[str, ReaderTensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for each in stored:
        source = tensors[each.name]
        with boundary(ModelError, f"GGUF tensor {source.name} can not be de-quantised"):
            values = np.array(dequantize(source.data, source.tensor_type), dtype=np.float32)  # never the mapped file
        for name, tensor in zip(each.sources, from_file(torch.from_numpy(values), each, spec, family), strict=True):
            yield name, tensor.to(dtype).contiguous()
