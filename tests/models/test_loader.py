"""Folders in: every name has its partner, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference_models import logits_of, save_reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.core.errors import ModelError
from tandem.models.loader import load_model, read_spec

IDS = [5, 9, 3, 77, 41, 8, 8, 60]


def rewrite(folder: Path, change) -> None:
    """Apply ``change`` to the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sources_of_every_width_load(dtype: torch.dtype, tmp_path: Path):
    save_reference(tmp_path / "model", "llama", dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, IDS), theirs(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=0)


def test_shards_load(tmp_path: Path):
    theirs = save_reference(tmp_path / "model", "qwen3", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, IDS), theirs(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=0)


def test_a_lost_shard_and_a_wrong_index_are_named(tmp_path: Path):
    save_reference(tmp_path / "model", "llama", max_shard_size="50KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    saved = json.loads(index.read_text())
    moved = json.loads(index.read_text())
    moved["weight_map"]["model.norm2.weight"] = moved["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(moved))
    with pytest.raises(ModelError, match=r"disagree about model\.norm\.weight, model\.norm2\.weight"):
        load_model(tmp_path / "model", dtype=torch.float32)
    index.write_text(json.dumps(saved))
    shard = saved["weight_map"]["model.norm.weight"]
    (tmp_path / "model" / shard).unlink()
    with pytest.raises(ModelError, match=f"names {shard}, which is not there"):
        load_model(tmp_path / "model", dtype=torch.float32)


def test_an_unknown_and_a_missing_name_are_errors(tmp_path: Path):
    folder = tmp_path / "model"
    save_reference(folder, "llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"no parameter for model\.layers\.0\.extra\.weight"):
        load_model(folder, dtype=torch.float32)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.extra.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]

    rewrite(folder, rename)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(folder, dtype=torch.float32)


def test_a_wrong_shape_is_an_error(tmp_path: Path):
    save_reference(tmp_path / "model", "llama")
    rewrite(tmp_path / "model", lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(47,\), expected \(48,\)"):
        load_model(tmp_path / "model", dtype=torch.float32)


def test_old_rotary_tables_and_a_repeated_tied_head_are_not_unknown(tmp_path: Path):
    folder = tmp_path / "model"
    save_reference(folder, "llama", tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(folder, add)
    load_model(folder, dtype=torch.float32)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match="differs from the embedding"):
        load_model(folder, dtype=torch.float32)


def test_a_missing_folder_names_its_neighbours(tmp_path: Path):
    (tmp_path / "smollm").mkdir()
    with pytest.raises(ModelError, match="model folder not found") as caught:
        read_spec(tmp_path / "smolm")
    assert "smollm" in caught.value.hint


def test_broken_folders_say_what_is_wrong(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is broken"):
        read_spec(tmp_path)
    (tmp_path / "config.json").unlink()
    folder = tmp_path / "model"
    save_reference(folder, "llama")
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors is broken"):
        load_model(folder, dtype=torch.float32)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model\.safetensors") as caught:
        load_model(folder, dtype=torch.float32)
    assert "pickle" in caught.value.hint


def test_unsupported_configurations_are_refused_by_name(tmp_path: Path):
    folder = tmp_path / "model"
    save_reference(folder, "llama")
    good = (folder / "config.json").read_text()
    for changes, message in (
        ({"model_type": "qwen33"}, "model type 'qwen33' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into 3"),
    ):
        (folder / "config.json").write_text(good)
        edit_config(folder, **changes)
        with pytest.raises(ModelError, match=message):
            read_spec(folder)
    (folder / "config.json").write_text(good)
    edit_config(folder, model_type="qwen33")
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    assert caught.value.hint == "did you mean qwen3 or qwen3_moe?"


def test_end_tokens_of_the_generation_config_count(tmp_path: Path):
    save_reference(tmp_path / "model", "llama")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_spec(tmp_path / "model").eos_ids == (2, 7)
