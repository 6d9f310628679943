"""GGUF files in: de-quantised once into a Hugging Face folder.

Owns: the GGUF names of decoder weights, the rotary order GGUF keeps q and k of some architectures in, and the
metadata that becomes a configuration. The result is the model the file really holds: de-quantised 4-bit weights
stay de-quantised 4-bit weights.
Refuses: architectures no family claims, tensors it does not know (by name).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize

from tandem.core.errors import ModelError, boundary
from tandem.models.family import Family, families
from tandem.models.layers import rope_frequencies
from tandem.models.saver import write_config, write_tensors
from tandem.models.spec import ModelSpec, RopeSpec
from tandem.text.tokenizer import save_gguf_tokenizer

ROPE_FACTORS = "rope_freqs.weight"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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
    wanted = {piece.source for piece in family.pieces(spec)}
    names = {_translate(name, file): name for name in tensors if name != ROPE_FACTORS}
    for what, lost in (("lacks", wanted - set(names)), ("has no place for", set(names) - wanted)):
        if lost:
            raise ModelError(f"{file} {what} {', '.join(sorted(lost)[:5])}")
    write_config(spec, folder, dtype=dtype)
    write_tensors(_convert(spec, family, names, tensors, dtype), folder)
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
    prefix = family.gguf_architecture
    heads = int(metadata.number(f"{prefix}.attention.head_count"))
    hidden = int(metadata.number(f"{prefix}.embedding_length"))
    head_dim = int(metadata.number(f"{prefix}.attention.key_length", hidden // heads))
    if metadata.number(f"{prefix}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{metadata.file}: rotary embedding of a part of each head is not supported")
    eos = metadata.token_id("eos")
    rope = _read_rope(metadata, prefix, head_dim, tensors.get(ROPE_FACTORS))
    return ModelSpec(
        family=family.name,
        vocab_size=int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        hidden_size=hidden,
        num_layers=int(metadata.number(f"{prefix}.block_count")),
        num_heads=heads,
        num_kv_heads=int(metadata.number(f"{prefix}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(metadata.number(f"{prefix}.feed_forward_length")),
        max_positions=int(metadata.number(f"{prefix}.context_length")),
        # Stored as float32; its shortest decimal form is the number that was meant.
        norm_eps=float(str(np.float32(metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")))),
        rope=rope,
        tied_head="output.weight" not in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        bos_id=metadata.token_id("bos"),
        eos_ids=() if eos is None else (eos,),
        pad_id=metadata.token_id("padding"),
    )


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


def _translate(name: str, file: Path) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    block, _, inner = stem.partition(".")
    layer, _, inner = inner.partition(".")
    if block == "blk" and inner in INNER:
        return f"model.layers.{layer}.{INNER[inner]}.{suffix}"
    raise ModelError(f"{file}: tensor {name} is not known")


def _convert(
    spec: ModelSpec, family: Family, names: dict[str, str], tensors: dict[str, ReaderTensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for piece in family.pieces(spec):
        source = tensors[names[piece.source]]
        with boundary(ModelError, f"GGUF tensor {source.name} can not be de-quantised"):
            values = np.array(dequantize(source.data, source.tensor_type), dtype=np.float32)  # never the mapped file
        tensor = torch.from_numpy(values)
        if family.gguf_permuted:
            if ".q_proj." in piece.source:
                tensor = _half_order(tensor, spec.num_heads)
            elif ".k_proj." in piece.source:
                tensor = _half_order(tensor, spec.num_kv_heads)
        yield piece.source, tensor.to(dtype)


def _half_order(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from interleaved pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...)."""
    shape = tensor.shape
    return tensor.view(num_heads, shape[0] // num_heads // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)
