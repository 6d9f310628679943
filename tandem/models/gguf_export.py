"""Hugging Face folders out to one GGUF file, for llama.cpp and what is built on it.

Owns: which tensor is stored in which type, the metadata, and that a file appears whole or not at all. Names and the
form of tensors are those of ``gguf_names``; the tokenizer is ``gguf_tokenizer``'s. Tensors are read, converted and
written one at a time.
Refuses: families that GGUF has no architecture for, and what its readers take for granted where the model differs.
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
from tandem.models.gguf_import import EVERY, LARGEST, LOCAL_THETA
from tandem.models.gguf_names import ROPE_FACTORS, Stored, stored_tensors, to_file
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
    _check(spec, family, folder)
    stored = stored_tensors(spec, family)
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
            for name_, shape, type_ in _plan(spec, stored, source, kind):
                _announce(writer, name_, shape, type_)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for array, type_ in _arrays(spec, family, stored, source, kind):
                writer.write_tensor_data(quantize(array, type_))
        writer.close()
        os.replace(scratch, file)
    except BaseException:
        writer.close()
        scratch.unlink(missing_ok=True)
        raise


def _check(spec: ModelSpec, family: Family, folder: Path) -> None:
    """Readers know some facts of an architecture that the file has no place for."""
    scalar = spec.hidden_size // spec.num_heads if spec.num_layers == LARGEST else spec.head_dim
    for wrong, what in (
        (any(spec.windows) and not family.gguf_windows, "sliding windows"),
        (spec.query_scalar not in (None, scalar), f"scores divided by the root of {spec.query_scalar}"),
        (spec.experts and not spec.experts.normalised, "experts whose weights do not sum to one"),
        (spec.experts and spec.experts.dense_layers, "layers without experts between those that have them"),
    ):
        if wrong:
            raise ModelError(f"{folder}: GGUF can not say that a {spec.family} has {what}", hint="--format hf")


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


    if any(spec.windows):
        writer.add_sliding_window(max(spec.windows))
        local = [bool(window) for window in spec.windows]
        if local != [bool((layer + 1) % EVERY) for layer in range(spec.num_layers)]:
            writer.add_sliding_window_pattern(local)
        if spec.local_rope and spec.local_rope.theta != LOCAL_THETA:
            writer.add_rope_freq_base_swa(spec.local_rope.theta)
    if spec.experts:
        writer.add_expert_count(spec.experts.num_experts)
        writer.add_expert_used_count(spec.experts.per_token)
        writer.add_expert_feed_forward_length(spec.experts.intermediate_size)


def _type_of(stored: Stored, row: int, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """A row that is no whole number of blocks stays in bfloat16."""
    if stored.precise:
        return GGMLQuantizationType.F32
    return kind if row % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.BF16


def _plan(
    spec: ModelSpec, stored: list[Stored], source: TensorSource, kind: GGMLQuantizationType
) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    """Name, shape and type of every tensor, in the order of ``_arrays``."""
    if spec.rope.scaling == "llama3":
        yield ROPE_FACTORS, (spec.head_dim // 2,), GGMLQuantizationType.F32
    for each in stored:
        shape = source.shape(each.sources[0])
        yield each.name, (len(each.sources), *shape) if each.stacked else shape, _type_of(each, shape[-1], kind)


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], stored: GGMLQuantizationType) -> None:
    per_block, block_bytes = GGML_QUANT_SIZES[stored]
    if stored is GGMLQuantizationType.F32:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4)
        return
    in_bytes = (*shape[:-1], shape[-1] // per_block * block_bytes)
    writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), raw_dtype=stored)


def _arrays(
    spec: ModelSpec, family: Family, stored: list[Stored], source: TensorSource, kind: GGMLQuantizationType
) -> Iterator[tuple[np.ndarray, GGMLQuantizationType]]:
    if spec.rope.scaling == "llama3":  # the rule's result, one divisor a frequency
        plain = rope_frequencies(RopeSpec(theta=spec.rope.theta), spec.head_dim)
        yield (plain / rope_frequencies(spec.rope, spec.head_dim)).float().numpy(), GGMLQuantizationType.F32
    for each in stored:
        tensors = [source.read(name).to(torch.float32) for name in each.sources]
        tensor = to_file(tensors, each, spec, family)
        yield tensor.contiguous().numpy(), _type_of(each, tensor.shape[-1], kind)
