"""``tandem serve``: a finished run answers a stock client, and ends on a signal as a server should."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import openai
import pytest
import torch
from app_pieces import Child, flags_of, said, small
from piece_tokenizer import pieces_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.app.serve import _name
from tandem.models.builtin import GEMMA3_TEMPLATE
from tandem.models.gguf_import import import_gguf
from tandem.models.loader import init_model, read_spec
from tandem.models.saver import save_model
from tandem.models.spec import ModelSpec, RopeSpec

PROMPT = [{"role": "user", "content": "sort list"}]


def test_a_run_is_served(place: Path, finished: tuple[Path, Child]):
    child = Child(["serve", str(finished[0]), "--port", "0"], place)
    child.until(lambda: " at http://" in child.out)
    found = re.search(r"serving (\S+) at (\S+) ", child.out)
    assert found is not None and found[1] == "finished"
    with openai.OpenAI(base_url=found[2], api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["finished"]
        answer = client.chat.completions.create(model="finished", messages=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == greedy_text(finished[0] / "model", 12)
    child.signal(signal.SIGINT)
    child.wait(0)
    assert "stopping" in child.err and "Traceback" not in child.said and "episodes" not in child.err
    child.assert_nothing_left()


GEMMA = ModelSpec(
    family="gemma3_text", vocab_size=384, hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=1, head_dim=16,
    intermediate_size=96, max_positions=4096, tied_head=True, qk_norm=True, windows=(32,) * 5 + (0,),
    local_rope=RopeSpec(theta=10000.0), query_scalar=16, activation="gelu_tanh", unit_offset_norms=True,
    post_norms=True, scaled_embedding=True, bos_id=2, eos_ids=(1, 5), pad_id=0,
)  # fmt: skip


def test_a_gemma_is_trained_exported_and_served(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = init_model(GEMMA, seed=0, dtype=torch.float32)
    save_model(model, tmp_path / "gemma", tokenizer_from=pieces_tokenizer(tmp_path / "pieces"))
    (tmp_path / "gemma" / "chat_template.jinja").write_text(GEMMA3_TEMPLATE)
    flags = {
        "model.path": tmp_path / "gemma", "model.dtype": "bfloat16", "model.max-context-tokens": 1024,
        "warmup.steps": 1, "environment.num-eval-tasks": 2,
    }  # fmt: skip
    Child(["train", *small(tmp_path, "run", steps=1), *flags_of(flags)], place).wait()
    run = tmp_path / "run"
    monkeypatch.chdir(place)
    said(capsys, "export", str(run), str(tmp_path / "out.gguf"), "--format", "gguf")
    (tmp_path / "back").mkdir()
    assert import_gguf(tmp_path / "out.gguf", tmp_path / "back") == read_spec(run / "model")
    child = Child(["serve", str(run), "--port", "0", "--model.dtype", "float32"], place)
    child.until(lambda: " at http://" in child.out)
    found = re.search(r"serving (\S+) at (\S+) ", child.out)
    assert found is not None and found[1] == "run"
    greedy = {"model": "run", "max_tokens": 12, "temperature": 0}
    with openai.OpenAI(base_url=found[2], api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(messages=PROMPT, **greedy)
        chunks = list(client.chat.completions.create(messages=PROMPT, stream=True, **greedy))
        whole = client.completions.create(prompt="hello world", **greedy)
        pieces = list(client.completions.create(prompt="hello world", stream=True, **greedy))
    assert answer.choices[0].message.content == greedy_text(run / "model", 12)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == answer.choices[0].message.content
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    child.signal(signal.SIGINT)
    child.wait(0)


def test_a_model_is_called_as_it_was_asked_for(tmp_path: Path):
    names = {"gemma3": "gemma3", "~/models/some-1.7B": "some-1.7B", "x/some-1.7B.gguf": "some-1.7B"}
    assert {path: _name(Path(path)) for path in names} == names
    assert _name(tmp_path / "run" / "model") == "run"


def greedy_text(folder: Path, num_tokens: int) -> str:
    """What plain ``transformers`` makes of the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_what_cannot_be_served_is_said_at_once(
    place: Path, finished: tuple[Path, Child], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(place)
    heard = said(capsys, "serve", "finishd", code=1)
    assert heard == "error: no run and no model 'finishd'\nhint: did you mean finished?\n"
