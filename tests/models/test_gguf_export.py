"""GGUF files out: what other readers find in them is the model and the tokenizer that went in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from piece_tokenizer import pieces_tokenizer
from reference_models import logits_of

from tandem.core.errors import ModelError
from tandem.models.builtin import resolve_model
from tandem.models.gguf_export import export_gguf
from tandem.models.gguf_import import import_gguf
from tandem.models.loader import init_model, load_model, read_spec
from tandem.models.saver import save_model
from tandem.models.spec import ExpertSpec, ModelSpec, RopeSpec
from tandem.text.tokenizer import load_tokenizer

IDS = [5, 9, 3, 77, 41, 8, 8, 60]
TEXTS = (
    "Hello  world,\n\n 12 345 héllo\t世 it's we'RE  \r\n", "<|im_start|>user\nHi<|im_end|>\n", "f(x):\n\treturn x**2 ",
)


def saved(tmp_path: Path, **changes: object) -> Path:
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
             "intermediate_size": 96, "max_positions": 256, "eos_ids": (1,), "pad_id": 2, "family": "llama"}
    spec = ModelSpec(**(sizes | changes))
    model = init_model(spec, seed=3, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # no two alike, so that an exchanged one shows
                parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))) - 0.5)
    folder, pieces = tmp_path / "folder", tmp_path / "pieces"
    tokenizer = pieces_tokenizer(pieces) if spec.family == "gemma3_text" else resolve_model("tiny")
    save_model(model, folder, tokenizer_from=tokenizer)
    return folder


GEMMA = {"family": "gemma3_text", "qk_norm": True, "query_scalar": 16, "activation": "gelu_tanh", "tied_head": True,
         "num_layers": 6, "num_kv_heads": 1, "windows": (7, 7, 7, 7, 7, 0), "unit_offset_norms": True,
         "post_norms": True, "local_rope": RopeSpec(theta=10000.0), "scaled_embedding": True,
         "rope": RopeSpec(theta=1e6), "bos_id": 2}  # fmt: skip
OTHER_WINDOWS = GEMMA | {"windows": (7, 0, 7, 0, 7, 7), "local_rope": RopeSpec(theta=500.0), "tied_head": False}
EXPERTS = ExpertSpec(num_experts=4, per_token=2, intermediate_size=32, normalised=True)
MOE = {"family": "qwen3_moe", "qk_norm": True, "experts": EXPERTS}


def round_trip(folder: Path, weights: str = "f32") -> Path:
    file, back = folder.with_suffix(".gguf"), folder.with_name("back")
    export_gguf(folder, file, weights=weights)
    back.mkdir()
    import_gguf(file, back, dtype=torch.float32)
    return back


@pytest.mark.parametrize("changes", [
    {"tied_head": True},
    {"family": "qwen3", "qk_norm": True},
    {"qkv_bias": True, "out_bias": True},
    {"rope": RopeSpec(theta=500000.0, scaling="llama3", factor=8.0)},
    {"rope": RopeSpec(theta=10000.0, scaling="linear", factor=4.0)},
    GEMMA, OTHER_WINDOWS, MOE,
], ids=["llama", "qwen3", "biases", "llama3", "linear", "gemma", "windows", "experts"])
def test_the_same_logits_and_specification_come_back(changes, tmp_path: Path) -> None:
    folder = saved(tmp_path, **changes)
    back = round_trip(folder)
    assert read_spec(back) == read_spec(folder)
    before, after = (logits_of(load_model(each, dtype=torch.float32), IDS) for each in (folder, back))
    # Divisors of frequencies, and norms with their unit added, are rounded once.
    torch.testing.assert_close(after, before, atol=1e-5 if "rope" in changes else 0, rtol=0)


def test_eight_bits_are_within_their_precision(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    back = round_trip(folder, "q8_0")
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(folder.with_suffix(".gguf")).tensors}
    assert kinds["blk.0.attn_q.weight"] == gguf.GGMLQuantizationType.Q8_0
    assert kinds["blk.0.attn_norm.weight"] == gguf.GGMLQuantizationType.F32
    before, after = (logits_of(load_model(each, dtype=torch.float32), IDS) for each in (folder, back))
    assert 0 < (after - before).abs().max().item() < 0.02 * before.abs().max().item()


def test_brain_floats_are_stored_as_they_are_and_odd_rows_stay_so(tmp_path: Path) -> None:
    folder = saved(tmp_path, intermediate_size=80)  # 80 is no whole number of blocks of 32
    source, model = tmp_path / "source", load_model(folder, dtype=torch.bfloat16)
    save_model(model, source, tokenizer_from=folder)
    back = round_trip(source, "bf16")
    for name, parameter in load_model(back, dtype=torch.float32).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).float()), name
    export_gguf(source, tmp_path / "odd.gguf", weights="q8_0")
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "odd.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == gguf.GGMLQuantizationType.BF16
    assert kinds["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q8_0


# Sizes of heads that the library takes for granted in these families.
@pytest.mark.parametrize("changes", [
    {"tied_head": True}, {"family": "qwen3", "qk_norm": True, "head_dim": 128},
    GEMMA | {"head_dim": 256, "query_scalar": 256}, MOE | {"head_dim": 128},
], ids=["llama", "qwen3", "gemma", "experts"])  # fmt: skip
def test_the_reference_library_reads_the_file(changes, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = saved(tmp_path, **changes)
    export_gguf(folder, tmp_path / "model.gguf", weights="f32")
    # Facts that the file holds, or that its architecture means, and that the library does not take from there.
    told = {"moe_intermediate_size": EXPERTS.intermediate_size, "norm_topk_prob": True} if "experts" in changes else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="model.gguf", dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True), **told,
    )  # fmt: skip
    with torch.no_grad():
        logits = theirs(torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(logits_of(load_model(folder, dtype=torch.float32), IDS), logits, atol=1e-4, rtol=0)


def test_text_becomes_the_same_ids(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    back = round_trip(folder)
    before, after = load_tokenizer(folder), load_tokenizer(back)
    for text in TEXTS:
        assert after.encode(text, special=True) == before.encode(text, special=True)
    assert (after.chat_template, after.eos_ids) == (before.chat_template, before.eos_ids)
    fields = gguf.GGUFReader(folder.with_suffix(".gguf")).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"


def test_pieces_become_the_same_ids(tmp_path: Path) -> None:
    folder = saved(tmp_path, **GEMMA)
    back = round_trip(folder)
    before, after = load_tokenizer(folder), load_tokenizer(back)
    for text in ("hello world", "  hell\n\nor w, wor?", "<start_of_turn>user\nHi \u4e16<end_of_turn>\n"):
        assert after.encode(text, special=True) == before.encode(text, special=True)
    assert after.encode_document("hello") == before.encode_document("hello")
    assert before.encode_document("hello")[0] == 2 and len(before.encode_document("hello")) == 2
    content = json.loads((folder / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    merges.insert(0, merges.pop(merges.index(["hel", "l"])))  # one of two ways to a piece comes before other pieces
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="several ranks"):
        export_gguf(folder, tmp_path / "out.gguf")
    del merges[0]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="1 ways to make a piece"):
        export_gguf(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize(("changes", "what"), [
    ({"family": "qwen3", "qk_norm": True, "windows": (7, 0)}, "sliding windows"),
    (GEMMA | {"query_scalar": 24}, "scores divided by the root of 24"),
    (MOE | {"experts": replace(EXPERTS, normalised=False)}, "do not sum to one"),
    (MOE | {"experts": replace(EXPERTS, dense_layers=(1,))}, "layers without experts"),
])  # fmt: skip
def test_what_readers_would_take_otherwise_is_refused(changes, what: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=what):
        export_gguf(saved(tmp_path, **changes), tmp_path / "out.gguf")


def test_what_has_no_place_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="no name in GGUF"):
        export_gguf(folder, tmp_path / "out.gguf")
    with pytest.raises(ModelError, match="'q3' are not supported"):
        export_gguf(folder, tmp_path / "out.gguf", weights="q3")
    (tmp_path / "there.gguf").write_text("")
    with pytest.raises(ModelError, match="exists"):
        export_gguf(folder, tmp_path / "there.gguf")
    assert [each.name for each in tmp_path.glob("*out*")] + [each.name for each in tmp_path.glob(".*")] == []
