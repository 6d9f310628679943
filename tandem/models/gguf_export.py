"""Hugging Face folders out to one GGUF file, for llama.cpp and what is built on it.

Owns: which tensor is stored in which type (vectors always in float32: every reader wants them so), and that a file
appears whole or not at all. Names and the rotary order are those of ``gguf_import``; the tokenizer is
``gguf_tokenizer``'s. Tensors are read, converted and written one at a time.
Refuses: families that GGUF has no architecture for, rotary rules it can not hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType, quantize
from gguf.constants import GGML_QUANT_SIZES

from tandem.core.errors import ModelError
from tandem.models.family import Family, find_family
from tandem.models.gguf_import import INNER, OUTER, ROPE_FACTORS
from tandem.models.gguf_tokenizer import write_tokenizer
from tandem.models.layers import rope_frequencies
from tandem.models.loader import TensorSource, open_tensors, read_spec
from tandem.models.spec import ModelSpec, RopeSpec

TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
QUANTISATION_VERSION = 2  # of the block layouts; the only one that is written today
THEIRS = {ours: name for name, ours in {**OUTER, **INNER}.items()}


def export_gguf(folder: str | Path, file: Path, *, weights: str = "bf16", name: str = "") -> None:
    """Write the model, tokenizer and chat template of ``folder`` as ``file``; matrices are stored as ``weights``:
    ``f32``, ``bf16`` or ``q8_0`` (8 bits, one scale to 32 numbers).

    Raises:
        ModelError: ``file`` exists, GGUF has no place for this model, or the folder is broken.
    """
    folder = Path(folder)
    if weights not in TYPES:
        raise ModelError(f"GGUF weights {weights!r} are not supported", hint=f"one of {', '.join(TYPES)}")
    if file.exists():
        raise ModelError(f"{file} exists", hint="give a new file")
    spec = read_spec(folder)
    family = find_family(spec.family, where=str(folder))
    if not family.gguf_architecture:
        raise ModelError(f"{folder}: {spec.family} models are not written as GGUF", hint="--format hf")
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}-new")
    kind, file_type = TYPES[weights]
    writer = GGUFWriter(scratch, family.gguf_architecture)
    try:
        writer.add_name(name or folder.name)
        writer.add_file_type(file_type)
        writer.add_quantization_version(QUANTISATION_VERSION)
        _write_shape(writer, spec)
        write_tokenizer(writer, folder, spec)
        with ExitStack() as stack:
            source = open_tensors(folder, stack)
            for tensor_name, shape, stored in _plan(spec, family, source, kind):
                _announce(writer, tensor_name, shape, stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for array, stored in _arrays(spec, family, source, kind):
                writer.write_tensor_data(quantize(array, stored))
        writer.close()
        os.replace(scratch, file)
    except BaseException:
        writer.close()
        scratch.unlink(missing_ok=True)
        raise


def _write_shape(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)
    if spec.rope.scaling == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)


def _stored(shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """The type of one tensor: vectors are float32; a row that is no whole number of blocks stays in bfloat16."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.BF16


def _plan(
    spec: ModelSpec, family: Family, source: TensorSource, kind: GGMLQuantizationType
) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Name, shape and type of every tensor, in the order of ``_arrays``."""
    if spec.rope.scaling == "llama3":
        yield ROPE_FACTORS, (spec.head_dim // 2,), GGMLQuantizationType.F32
    for piece in family.pieces(spec):
        shape = source.shape(piece.source)
        yield _translate(piece.source), shape, _stored(shape, kind)


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], stored: GGMLQuantizationType) -> None:
    per_block, block_bytes = GGML_QUANT_SIZES[stored]
    if stored is GGMLQuantizationType.F32:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4)
        return
    in_bytes = (*shape[:-1], shape[-1] // per_block * block_bytes)
    writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), raw_dtype=stored)


def _arrays(
    spec: ModelSpec, family: Family, source: TensorSource, kind: GGMLQuantizationType
) -> Iterator[tuple[np.ndarray, GGMLQuantizationType]]:
    if spec.rope.scaling == "llama3":  # the rule's result, one divisor a frequency
        plain = rope_frequencies(RopeSpec(theta=spec.rope.theta), spec.head_dim)
        yield (plain / rope_frequencies(spec.rope, spec.head_dim)).float().numpy(), GGMLQuantizationType.F32
    for piece in family.pieces(spec):
        tensor = source.read(piece.source).to(torch.float32)
        if family.gguf_permuted and ".q_proj." in piece.source:
            tensor = _pair_order(tensor, spec.num_heads)
        elif family.gguf_permuted and ".k_proj." in piece.source:
            tensor = _pair_order(tensor, spec.num_kv_heads)
        yield tensor.contiguous().numpy(), _stored(tuple(tensor.shape), kind)


def _translate(source: str) -> str:
    stem, _, suffix = source.rpartition(".")
    if stem in THEIRS:
        return f"{THEIRS[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    if inner not in THEIRS:
        raise ModelError(f"tensor {source} has no name in GGUF", hint="--format hf")
    return f"blk.{layer}.{THEIRS[inner]}.{suffix}"


def _pair_order(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves (x0 x1 ... y0 y1 ...) to interleaved pairs (x0 y0 x1 y1 ...)."""
    shape = tensor.shape
    return tensor.view(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)
