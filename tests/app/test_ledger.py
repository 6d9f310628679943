"""The memory that is predicted is the memory that a step takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.app import ledger
from tandem.app.ledger import check_memory, predict
from tandem.app.preflight import prepare_model
from tandem.config.load import load
from tandem.core.errors import ConfigError
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model
from tandem.models.lora import LoraSpec, add_adapters, save_adapters

TOLERANCE = 0.2  # of the prediction; what the allocator keeps for itself is not predicted

STEP = """
import asyncio, json, re, sys, torch
from pathlib import Path
from tandem.app.ledger import predict
from tandem.app.preflight import ModelFiles
from tandem.config.load import load
from tandem.algorithms.spec import resolve
from tandem.algorithms.credit import demonstration
from tandem.core.types import ids, mask
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights
from tandem.models.loader import init_model
from tandem.models.spec import ModelSpec
from tandem.trainer.batcher import make_plan
from tandem.app.build import DTYPES

def field(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def main(dtype, recompute):
    tokens = 1024
    recipe, _ = load(flags=["--algorithm.name", "sft", "--model.dtype", dtype, "--data.path", "x",
                            "--engine.train.micro-batch-tokens", str(tokens),
                            "--engine.train.checkpoint-activations", recompute])
    def run(hidden_size, num_layers, tokens):
        spec = ModelSpec(family="llama", vocab_size=4096, hidden_size=hidden_size, num_layers=num_layers, num_heads=8,
                         num_kv_heads=4, head_dim=64, intermediate_size=3 * hidden_size, max_positions=2048,
                         tied_head=True)
        algorithm, compute = resolve(recipe.algorithm), ComputeQueue()
        model = init_model(spec, seed=0, dtype=DTYPES[dtype])
        engine = LocalTrainEngine(PublishedWeights(model), compute, train=recipe.engine.train, total_steps=2,
                                  optimizer=recipe.optimizer, algorithm=algorithm)
        rows = [demonstration(f"r{n}", ids([n + 1] * tokens), mask([0] + [1] * (tokens - 1))) for n in range(2)]
        for step in (1, 2):
            asyncio.run(engine.step(make_plan(step, rows, algorithm, recipe.engine.train)))
        compute.close()
        return predict(recipe, ModelFiles(path=Path("x"), spec=spec, renderer=None, max_context_tokens=2048)).peak

    run(64, 1, 16)  # the libraries' own memory
    before = field("VmRSS")
    predicted = run(512, 8, tokens)
    print(json.dumps({"predicted": predicted, "measured": field("VmHWM") - before}))

main(*sys.argv[1:])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process from /proc")
@pytest.mark.parametrize(("dtype", "recompute"), [("float32", "false"), ("bfloat16", "false"), ("bfloat16", "true")])
def test_a_step_takes_what_was_predicted(dtype: str, recompute: str) -> None:
    done = subprocess.run([sys.executable, "-c", STEP, dtype, recompute], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measured"] == pytest.approx(found["predicted"], rel=TOLERANCE)


def recipe(*more: str):
    return load(flags=["--model.path", "tiny", "--data.path", "x", *more])[0]


def test_every_wish_has_its_part(tmp_path: Path) -> None:
    def parts(*more: str) -> ledger.Ledger:
        asked = recipe(*more)
        return predict(asked, prepare_model(asked))

    data, episodes = parts("--algorithm.name", "sft"), parts("--algorithm.name", "grpo")
    assert "KV cache" not in data.kept and not data.rollout
    assert episodes.kept["KV cache"] > 0 and episodes.rollout
    assert parts("--algorithm.name", "grpo", "--engine.infer.kv-tokens", "65536").kept["KV cache"] == \
        2 * parts("--algorithm.name", "grpo", "--engine.infer.kv-tokens", "32768").kept["KV cache"]
    assert "critic and its state" in parts("--algorithm.name", "ppo").kept
    assert "reference" in parts("--algorithm.name", "dpo").kept
    adapters = parts("--algorithm.name", "sft", "--lora.rank", "4")
    assert adapters.kept["moments of the optimizer"] < data.kept["moments of the optimizer"] / 2
    tiny = load_model(resolve_model("tiny"), dtype=torch.float32)
    save_adapters(add_adapters(tiny, LoraSpec(rank=4, alpha=8), seed=0), tmp_path / "adapter", base="tiny")
    gone_on = parts("--algorithm.name", "sft", "--lora.path", str(tmp_path / "adapter"))
    assert gone_on.kept["moments of the optimizer"] == adapters.kept["moments of the optimizer"]
    less = parts("--algorithm.name", "sft", "--engine.train.checkpoint-activations", "true")
    assert less.train["activations"] < data.train["activations"]


def test_a_run_that_cannot_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe("--algorithm.name", "grpo")
    files = prepare_model(asked)
    needed = predict(asked, files).peak
    monkeypatch.setattr(ledger, "free_memory", lambda device: needed)
    assert check_memory(asked, files).peak == needed
    monkeypatch.setattr(ledger, "free_memory", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=r"needs about [\d.]+ GiB and [\d.]+ GiB are free") as caught:
        check_memory(asked, files)
    assert "engine." in caught.value.hint
