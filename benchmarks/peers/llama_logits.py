"""Logits of llama.cpp's own library: a question as JSON on the input, facts as JSON in the last line.

The library is read with ``ctypes``; the structures below are those of the version the benchmark names, and a library
whose defaults read otherwise is refused. All arithmetic it offers a choice for is kept in float32: keys, values, no
fused attention, no repacked weights.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np


class ModelParams(Structure):
    _fields_ = [
        ("devices", c_void_p), ("overrides", c_void_p), ("n_gpu_layers", c_int32), ("split_mode", c_int32),
        ("load_mode", c_int32), ("lazy_mode", c_int32), ("main_gpu", c_int32), ("tensor_split", c_void_p),
        ("progress", c_void_p), ("progress_data", c_void_p), ("kv_overrides", c_void_p), ("vocab_only", c_bool),
        ("check_tensors", c_bool), ("use_extra_bufts", c_bool), ("no_host", c_bool), ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]  # fmt: skip


class ContextParams(Structure):
    _fields_ = [
        *((name, c_uint32) for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq",
        )),
        *((name, c_int32) for name in (
            "n_threads", "n_threads_batch", "ctx_type", "rope_scaling", "pooling", "attention", "flash_attention",
        )),
        *((name, c_float) for name in ("rope_base", "rope_scale", "ext", "factor", "fast", "slow")),
        ("yarn_orig_ctx", c_uint32), ("defrag", c_float), ("cb_eval", c_void_p), ("cb_data", c_void_p),
        ("type_k", c_int32), ("type_v", c_int32), ("abort", c_void_p), ("abort_data", c_void_p),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p), ("n_samplers", c_size_t), ("other", c_void_p),
    ]  # fmt: skip


class Batch(Structure):
    _fields_ = [
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", c_void_p), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    ]  # fmt: skip


ANSWERS: dict[str, tuple[Any, list[Any]]] = {
    "llama_version": (c_char_p, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_detokenize": (c_int32, [c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
}
ROOM = 4096  # tokens of the context, and bytes of the text


def library(folder: Path) -> Any:
    """The functions of ``libllama.so``; the libraries it needs lie beside it."""
    for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so"):
        if (folder / name).is_file():
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(folder / "libllama.so"))
    for name, (answer, words) in ANSWERS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = answer, words
    known = found.llama_context_default_params()
    if (known.n_ctx, known.n_batch, known.type_k, known.type_v, known.rope_scaling) != (512, 2048, 1, 1, -1):
        sys.exit(f"{folder}: llama.cpp {found.llama_version().decode()} has other structures than this script")
    return found


def main() -> None:
    question = json.load(sys.stdin)
    llama = library(Path(question["library"]))
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers, settings.use_extra_bufts = 0, False
    model = llama.llama_model_load_from_file(question["file"].encode(), settings)
    if not model:
        sys.exit(f"llama.cpp does not load {question['file']}")
    sizes = llama.llama_context_default_params()
    sizes.n_ctx, sizes.flash_attention, sizes.type_k, sizes.type_v = ROOM, 0, 0, 0  # off, and float32
    sizes.n_threads = sizes.n_threads_batch = question["threads"]
    context = llama.llama_init_from_model(model, sizes)
    if not context:
        sys.exit(f"llama.cpp makes no context for {question['file']}")
    vocab = llama.llama_model_get_vocab(model)
    width = llama.llama_vocab_n_tokens(vocab)
    room, text = (c_int32 * ROOM)(), question["text"].encode()
    count = llama.llama_tokenize(vocab, text, len(text), room, ROOM, True, False)
    tokens, rows, start = list(question["ids"]), [], 0
    cut = list(room[:count])
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    for step in range(question["new_tokens"]):
        fresh = tokens[start:]
        for place, token in enumerate(fresh):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        batch.n_tokens = len(fresh)
        if status := llama.llama_decode(context, batch):
            sys.exit(f"llama_decode returned {status} at step {step}")
        for place in range(len(fresh)):
            rows.append(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, place), (width,)).copy())
        start = len(tokens)
        tokens.append(int(rows[-1].argmax()))
    new = tokens[len(question["ids"]) :]
    said = ctypes.create_string_buffer(ROOM)
    size = llama.llama_detokenize(vocab, (c_int32 * len(new))(*new), len(new), said, ROOM, False, True)
    np.save(question["rows"], np.stack(rows))
    print(json.dumps({
        "version": llama.llama_version().decode(), "cut": cut, "new": new,
        "text": said.raw[:size].decode(errors="replace"),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
