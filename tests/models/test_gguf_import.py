"""GGUF files in: written here with the gguf package from models whose logits the reference library knows."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from reference_models import logits_of, reference_model

from tandem.core.errors import ModelError
from tandem.models.builtin import resolve_model
from tandem.models.gguf_import import import_gguf
from tandem.models.layers import rope_frequencies
from tandem.models.loader import load_model, read_spec
from tandem.models.spec import RopeSpec
from tandem.text.tokenizer import load_tokenizer

IDS = [5, 9, 3, 77, 41, 8, 8, 60]
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves of each head become pairs: row order 0, n/2, 1, n/2 + 1, ..."""
    rows = array.shape[0] // heads
    pairs = [half * rows // 2 + pair for pair in range(rows // 2) for half in (0, 1)]
    return array[[head * rows + row for head in range(heads) for row in pairs]]


def write_gguf(file: Path, model, kind: str, *, quantise=None, rope_divisors: np.ndarray | None = None,
               extra: str = "") -> dict[str, np.ndarray]:
    """Write a reference model as GGUF; returns what its weights are after quantisation, by reference name."""
    config, writer, kept = model.config, gguf.GGUFWriter(file, kind), {}
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokenizer = json.loads((resolve_model("tiny") / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template((resolve_model("tiny") / "chat_template.jinja").read_text())
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if quantise is not None and array.ndim == 2:
            kept[name] = gguf.dequantize(gguf.quantize(array, quantise), quantise)
        else:
            kept[name] = array
        if kind == "llama" and ".q_proj." in name:
            array = interleave(array, config.num_attention_heads)
        if kind == "llama" and ".k_proj." in name:
            array = interleave(array, config.num_key_value_heads)
        if quantise is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), array)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors)
    if extra:
        writer.add_tensor(extra, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def imported(file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "imported"
    folder.mkdir()
    import_gguf(file, folder, dtype=torch.float32)
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("quantise", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0])
def test_logits_are_those_of_the_dequantised_weights(kind: str, quantise, tmp_path: Path):
    theirs = reference_model(kind, **SIZES, tie_word_embeddings=kind == "llama")
    kept = write_gguf(tmp_path / "model.gguf", theirs, kind, quantise=quantise)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.from_numpy(kept[name]))
        ours = load_model(imported(tmp_path / "model.gguf", tmp_path), dtype=torch.float32)
        torch.testing.assert_close(logits_of(ours, IDS), theirs(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=0)


def test_tokenizer_and_template_come_along(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", reference_model("llama", **SIZES), "llama")
    folder = imported(tmp_path / "model.gguf", tmp_path)
    ours, source = load_tokenizer(folder), load_tokenizer(resolve_model("tiny"))
    text = "<|im_start|>user\nHow many? 12 héllo\t世<|im_end|>\n"
    assert ours.encode(text, special=True) == source.encode(text, special=True)
    assert ours.chat_template == source.chat_template
    assert ours.eos_ids == read_spec(folder).eos_ids == (1,)


def test_the_llama3_rope_rule_is_found_again(tmp_path: Path):
    rope = RopeSpec(theta=10000.0, scaling="llama3", factor=8.0)
    divisors = (rope_frequencies(RopeSpec(theta=10000.0), 16) / rope_frequencies(rope, 16)).numpy()
    write_gguf(tmp_path / "model.gguf", reference_model("llama", **SIZES), "llama", rope_divisors=divisors)
    found = read_spec(imported(tmp_path / "model.gguf", tmp_path)).rope
    assert (found.scaling, found.original_max_positions) == ("llama3", 8192)
    assert found.factor == pytest.approx(8.0, rel=1e-5)
    divisors[0] = 3.0
    write_gguf(tmp_path / "odd.gguf", reference_model("llama", **SIZES), "llama", rope_divisors=divisors)
    with pytest.raises(ModelError, match="does not follow the llama3 rule"):
        import_gguf(tmp_path / "odd.gguf", tmp_path)


def test_what_does_not_fit_is_named(tmp_path: Path):
    model = reference_model("llama", **SIZES)
    write_gguf(tmp_path / "odd.gguf", model, "llama", extra="blk.0.attn_sinks.weight")
    with pytest.raises(ModelError, match=r"has no place for blk\.0\.attn_sinks\.weight"):
        import_gguf(tmp_path / "odd.gguf", tmp_path)
    write_gguf(tmp_path / "bias.gguf", model, "llama", extra="blk.2.attn_q.bias")
    with pytest.raises(ModelError, match=r"has no place for blk\.2\.attn_q\.bias"):
        import_gguf(tmp_path / "bias.gguf", tmp_path)
    write_gguf(tmp_path / "mamba.gguf", model, "mamba")
    with pytest.raises(ModelError, match="architecture 'mamba'") as caught:
        import_gguf(tmp_path / "mamba.gguf", tmp_path)
    assert caught.value.hint == "supported: gemma3, llama, qwen3, qwen3moe"
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        import_gguf(tmp_path / "text.gguf", tmp_path)
