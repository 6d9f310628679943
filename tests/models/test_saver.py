"""Folders out: the reference library reads what we write, and answers alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from reference_models import greedy, logits_of, packed, save_reference
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.core.errors import ModelError
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model, load_scoring_model, read_spec
from tandem.models.saver import save_model, save_scoring_model

IDS = [5, 9, 3, 77, 41, 8, 8, 60]
ROPE = {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 300.0}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True}),
        ("qwen3", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("gemma3_text", {}),
        ("gemma3_text", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": LOCAL_ROPE}}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    ],
)
def test_the_reference_library_reads_what_we_save(kind: str, changes: dict, tmp_path: Path):
    save_reference(tmp_path / "first", kind, **changes)
    ours = load_model(tmp_path / "first", dtype=torch.float32)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.01)
    save_model(ours, tmp_path / "second", tokenizer_from=None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.float32).eval()
    again = load_model(tmp_path / "second", dtype=torch.float32)
    assert again.spec == ours.spec
    assert all(torch.equal(left, right) for left, right in zip(ours.parameters(), again.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, IDS), theirs(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=0)
        answer = theirs.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert greedy(ours, IDS, 12) == answer


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_a_reward_model_is_a_class_that_the_library_has(kind: str, tmp_path: Path):
    save_reference(tmp_path / "first", kind)
    ours = load_model(tmp_path / "first", dtype=torch.float32)
    head_1D = torch.randn(1, ours.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    save_scoring_model(ours, head_1D, tmp_path / "scorer", tokenizer_from=resolve_model("tiny"))
    [named] = json.loads((tmp_path / "scorer" / "config.json").read_text())["architectures"]
    theirs, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scorer", dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == named == type(getattr(transformers, named)(theirs.config)).__name__
    assert not report["missing_keys"] and not report["unexpected_keys"]
    positions, context = packed([len(IDS)])
    with torch.no_grad():
        hidden_TE = ours(torch.tensor(IDS), positions, context)
        score = hidden_TE[-1] @ head_1D[0]
        torch.testing.assert_close(theirs(torch.tensor([IDS])).logits[0, 0], score, atol=1e-4, rtol=0)
        body, head = load_scoring_model(tmp_path / "scorer", dtype=torch.float32)
        assert torch.equal(body(torch.tensor(IDS), positions, context), hidden_TE) and torch.equal(head, head_1D)
    with pytest.raises(ModelError, match="is not supported"):
        load_scoring_model(tmp_path / "first", dtype=torch.float32)


def test_shards_are_written_and_read(tmp_path: Path):
    theirs = save_reference(tmp_path / "first", "qwen3")
    save_model(load_model(tmp_path / "first", dtype=torch.float32), tmp_path / "second", tokenizer_from=None,
               max_shard_bytes=60_000)
    assert len(list((tmp_path / "second").glob("model-*.safetensors"))) > 2
    read_back = AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.float32)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, read_back.get_parameter(name)), name
    load_model(tmp_path / "second", dtype=torch.float32)


def test_the_tokenizer_goes_along(tmp_path: Path):
    tiny = resolve_model("tiny")
    save_model(load_model(tiny, dtype=torch.bfloat16), tmp_path / "saved", tokenizer_from=tiny)
    text = "How many lines?"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.encode(text) == AutoTokenizer.from_pretrained(tiny).encode(text)
    assert theirs.apply_chat_template([{"role": "user", "content": text}], tokenize=False).startswith("<|im_start|>")
    assert read_spec(tmp_path / "saved") == read_spec(tiny)


def test_nothing_is_overwritten_and_no_half_folder_stays(tmp_path: Path):
    model = load_model(resolve_model("tiny"), dtype=torch.float32)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="is not empty"):
        save_model(model, tmp_path / "full", tokenizer_from=None)
    with pytest.raises(ModelError, match="no tokenizer files"):
        save_model(model, tmp_path / "new", tokenizer_from=tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
