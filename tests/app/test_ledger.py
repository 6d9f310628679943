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
STEPS = Path(__file__).parent / "ledger_steps.py"
SMALLEST = ("--model.dtype bfloat16", "--engine.train.checkpoint-activations true")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process from /proc")
@pytest.mark.parametrize(
    "cases",
    [
        ["step --model.dtype float32", " ".join(["step", *SMALLEST, "--optimizer.moments 8bit"])],
        ["saving --model.dtype float32", "offload --model.dtype bfloat16 --optimizer.offload true",
         "export --model.dtype bfloat16 --lora.rank 8"],
        [" ".join(["ranks", *SMALLEST])],
    ],
    ids=["steps", "what stands beside", "ranks"],
)  # fmt: skip
def test_a_process_takes_what_was_predicted(cases: list[str]) -> None:
    done = subprocess.run([sys.executable, str(STEPS), *cases], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    for case, each in zip(cases, found, strict=True):
        for measured, predicted in zip(each["measured"], each["predicted"], strict=True):
            assert measured == pytest.approx(predicted, rel=TOLERANCE), (case, each)


def recipe(*more: str):
    return load(flags=["--model.path", "tiny", "--data.path", "x", *more])[0]


def test_every_wish_has_its_part(tmp_path: Path) -> None:
    def parts(*more: str) -> ledger.Ledger:
        asked = recipe(*more)
        return predict(asked, prepare_model(asked))

    data, episodes = parts("--algorithm.name", "sft"), parts("--algorithm.name", "grpo")
    assert "KV cache" not in data.kept and not data.rollout
    handed = parts("--algorithm.name", "grpo", "--engine.train.hand-over", "true")
    assert "KV cache" not in handed.kept and handed.rollout["KV cache"] == episodes.kept["KV cache"]
    assert handed.peak < episodes.peak
    assert episodes.kept["KV cache"] > 0 and episodes.rollout
    assert (
        parts("--algorithm.name", "grpo", "--engine.infer.kv-tokens", "65536").kept["KV cache"]
        == 2 * parts("--algorithm.name", "grpo", "--engine.infer.kv-tokens", "32768").kept["KV cache"]
    )
    assert {"critic", "state of the critic's optimizer"} <= set(parts("--algorithm.name", "ppo").kept)
    assert "reference" in parts("--algorithm.name", "dpo").kept
    adapters = parts("--algorithm.name", "sft", "--lora.rank", "4")
    assert adapters.kept["moments of the optimizer"] < data.kept["moments of the optimizer"] / 2
    tiny = load_model(resolve_model("tiny"), dtype=torch.float32)
    save_adapters(add_adapters(tiny, LoraSpec(rank=4, alpha=8), seed=0), tmp_path / "adapter", base="tiny")
    gone_on = parts("--algorithm.name", "sft", "--lora.path", str(tmp_path / "adapter"))
    assert gone_on.kept["moments of the optimizer"] == adapters.kept["moments of the optimizer"]
    small = parts("--algorithm.name", "sft", "--optimizer.moments", "8bit")
    assert 3.9 < data.kept["moments of the optimizer"] / small.kept["moments of the optimizer"] < 4
    less = parts("--algorithm.name", "sft", "--engine.train.checkpoint-activations", "true")
    assert less.train["activations"] < data.train["activations"]
    assert data.saving[ledger.COPIES] == 3 * data.kept["moments of the optimizer"] // 2
    assert not parts("--algorithm.name", "sft", "--trainer.checkpoint-every", "0").saving
    assert sum(parts("--algorithm.name", "ppo").saving.values()) == 2 * sum(episodes.saving.values())
    assert adapters.export and not data.export


def test_another_device_leaves_the_cpu_its_own_part() -> None:
    gpu = torch.device("cuda")

    def on_gpu(*more: str) -> ledger.Ledger:
        asked = recipe("--algorithm.name", "sft", *more)
        return predict(asked, prepare_model(asked), device=gpu)

    here, apart = on_gpu(), on_gpu("--optimizer.offload", "true")
    assert here.host is not None and apart.host is not None
    assert not here.host.kept and here.host.saving and here.host.export and not here.saving
    assert sum(apart.host.kept.values()) >= apart.host.saving[ledger.COPIES]
    assert apart.peak < here.peak and apart.host.peak > here.host.peak
    assert any(row[0].startswith("of the CPU, peak") for row in apart.rows())
    asked = recipe("--algorithm.name", "sft", "--optimizer.offload", "true")
    first = ledger.predict_first(asked, prepare_model(asked), 2, device=gpu)
    rank = ledger.predict_rank(asked, prepare_model(asked), 2, device=gpu)
    assert first.host is not None and rank.host is not None
    assert sum(rank.host.kept.values()) == sum(apart.host.kept.values()) // 2
    assert ledger.COPIES not in first.host.saving and sum(first.host.saving.values()) == sum(apart.host.saving.values())
    once = recipe("--algorithm.name", "sft", "--trainer.checkpoint-every", "0")
    last = ledger.predict_first(once, prepare_model(once), 2, device=torch.device("cpu"))
    assert not last.saving and "gathered state to save" in last.export


def test_a_run_that_cannot_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe("--algorithm.name", "grpo")
    files = prepare_model(asked)
    needed = predict(asked, files).peak
    monkeypatch.setattr(ledger, "free_memory", lambda device: needed)
    assert check_memory(asked, files).peak == needed
    monkeypatch.setattr(ledger, "free_memory", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=r"needs about [\d.]+ GiB of CPU memory and [\d.]+ GiB are free") as caught:
        check_memory(asked, files)
    assert "trainer.checkpoint_every" in caught.value.hint
