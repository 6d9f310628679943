"""``tandem serve``: a finished run answers a stock client, and ends on a signal as a server should."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import openai
import pytest
import torch
from app_pieces import Child, said
from transformers import AutoModelForCausalLM, AutoTokenizer

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
