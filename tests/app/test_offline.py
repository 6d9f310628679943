"""Training on data through the program's own entry: a model comes out, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.app.offline import prepare_offline
from tandem.app.run import recipe_of, train
from tandem.config.load import load
from tandem.core.errors import ConfigError
from tandem.core.events import DataLoaded, StepFinished
from tandem.record.replay import read


def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    made = [{"prompt": f"{a}+{b}?", "completion": f"{a + b}", "chosen": f"{a + b}", "rejected": "no"}
            for a in range(4) for b in range(3)]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, [*made, {"prompt": "x", "completion": "", "chosen": ""}])))
    return file


def recipe(tmp_path, method: str, name: str, *more: str):
    words = {
        "model.path": "tiny", "model.dtype": "float32", "model.max-context-tokens": 128, "algorithm.name": method,
        "data.path": rows(tmp_path), "data.batch-size": 4, "trainer.steps": 6, "trainer.checkpoint-every": 2,
        "trainer.keep-checkpoints": 3, "optimizer.learning-rate": 2e-3, "record.folder": tmp_path / "runs",
        "record.name": name, "engine.threads": 1,
    }  # fmt: skip
    return load(flags=[word for key, value in words.items() for word in (f"--{key}", str(value))] + list(more))


def steps(folder) -> list[StepFinished]:
    return [each.event for each in read(folder) if isinstance(each.event, StepFinished)]


@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
def test_the_loss_falls_and_transformers_loads_the_model(method, tmp_path) -> None:
    assert train(*recipe(tmp_path, method, "one")) == 0
    folder = tmp_path / "runs" / "one"
    losses = [event.loss for event in steps(folder)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    (loaded,) = [each.event for each in read(folder) if isinstance(each.event, DataLoaded)]
    assert (loaded.num_rows, loaded.num_kept) == (13, 12)
    if method != "reward":
        AutoModelForCausalLM.from_pretrained(folder / "model")
        return
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float32)
    ready = prepare_offline(recipe(tmp_path, method, "two")[0])
    scores = [
        [float(model(torch.tensor([list(stream[0])])).logits[0, 0].detach()) for stream in pair]
        for pair in ready.loaded.streams
    ]
    assert sum(better > worse for better, worse in scores) >= 10


@pytest.mark.parametrize("dora", ["false", "true"])
def test_adapters_learn_and_go_on_from_their_own_folder(dora, tmp_path) -> None:
    lora = ["--lora.rank", "4", "--lora.dora", dora]
    assert train(*recipe(tmp_path, "sft", "one", *lora)) == 0
    one = tmp_path / "runs" / "one"
    losses = [event.loss for event in steps(one)]
    assert losses[-1] < losses[0]
    assert train(*recipe(tmp_path, "sft", "two", "--lora.path", str(one / "adapter"), "--trainer.steps", "1")) == 0
    (again,) = [event.loss for event in steps(tmp_path / "runs" / "two")]
    assert again < losses[0]
    AutoModelForCausalLM.from_pretrained(one / "model")


def test_held_out_loss_is_measured(tmp_path) -> None:
    assert train(*recipe(tmp_path, "sft", "one", "--data.eval-path", str(tmp_path / "rows.jsonl"))) == 0
    (last,) = [event for event in steps(tmp_path / "runs" / "one") if "eval_loss" in event.metrics]
    assert last.step == 6 and 0 < last.metrics["eval_loss"] < 7


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path) -> None:
    assert train(*recipe(tmp_path, "dpo", "whole")) == 0
    whole, cut = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut"
    step = "checkpoints/step-000002"
    shutil.copytree(whole / step, cut / step)
    shutil.copy(whole / "recipe.json", cut)
    (cut / "events.jsonl").touch()  # killed before its first event
    assert train(*recipe_of(cut), resume=cut) == 0
    assert (cut / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert [event.loss for event in steps(cut)] == [event.loss for event in steps(whole)][-4:]


def test_missing_data_is_said_before_a_model_is_loaded(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        prepare_offline(load(flags=["--algorithm.name", "sft"])[0])


def test_two_processes_lose_what_one_loses_and_resume_bit_for_bit(tmp_path) -> None:
    many = ("--trainer.devices", "2")
    assert train(*recipe(tmp_path, "sft", "one")) == 0
    assert train(*recipe(tmp_path, "sft", "two", *many)) == 0
    one, two, cut = (tmp_path / "runs" / name for name in ("one", "two", "cut"))
    wanted = [pytest.approx(event.loss, rel=1e-4) for event in steps(one)]
    assert [event.loss for event in steps(two)] == wanted
    step = "checkpoints/step-000002"
    shutil.copytree(two / step, cut / step)
    shutil.copy(two / "recipe.json", cut)
    (cut / "events.jsonl").touch()
    assert train(*recipe_of(cut), resume=cut) == 0
    model = "model/model.safetensors"
    assert (cut / model).read_bytes() == (two / model).read_bytes()


def test_a_reward_model_trains_on_one_device(tmp_path) -> None:
    with pytest.raises(ConfigError, match="one device"):
        prepare_offline(recipe(tmp_path, "reward", "x", "--trainer.devices", "2")[0])
