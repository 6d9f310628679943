"""A run as its user meets it: from the recipe to the model that is served elsewhere; and what must not stop it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from app_pieces import ENVIRONMENTS, TINY, Child, deterministic, flags_of, said, small, tandem
from environments_for_tests import BROKEN_TASK
from reference_models import logits_of
from transformers import AutoModelForCausalLM

from tandem.app.run import _check_checkpoints, recipe_of, resume_log, train
from tandem.config.load import load
from tandem.core.errors import ConfigError, RecordError
from tandem.core.events import (
    CheckpointSaved,
    EngineReported,
    EvaluationFinished,
    GroupStarted,
    StepFinished,
    WarningRaised,
    WeightsPublished,
)
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model
from tandem.record.log import EventLog
from tandem.record.metrics import fold
from tandem.record.replay import episodes, read


def test_the_phases_are_shown_and_summed_up(finished: tuple[Path, Child]):
    folder, child = finished
    places = [child.err.index(line) for line in (
        "run finished", "evaluation before: success", "warm-up 1/3  loss", "warm-up 3/3  loss",
        "evaluation after warm-up: success", "step 1/3  reward", "step 3/3  reward",
        "evaluation after reinforcement: success", "finished after step 3",
    )]  # fmt: skip
    assert places == sorted(places)
    shown = child.out.splitlines()
    for name in ("before", "after warm-up", "after reinforcement"):
        assert sum(line.startswith(f"{name} ") for line in shown) == 1
    assert f"model:    {folder / 'model'}" in shown and f"curve:    {folder / 'curve.png'}" in shown
    assert shown[-1].startswith("serve it: ") and shown[-1].endswith(f"tandem serve {folder}")
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in child.said and "Warning" not in child.said
    child.assert_nothing_left()


def test_a_reward_model_that_was_trained_here_judges_episodes(place: Path, tmp_path: Path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{n}?", "chosen": "yes", "rejected": "no"}) for n in range(8)))
    learn = {
        "model.path": "tiny", "algorithm.name": "reward", "data.path": rows, "data.batch-size": 4, "trainer.steps": 6,
        "engine.threads": 1, "model.max-context-tokens": 128, "optimizer.learning-rate": 1e-3,
        "record.folder": tmp_path, "record.name": "judge",
    }  # fmt: skip
    tandem("train", *flags_of(learn), place=place)
    model = str(tmp_path / "judge" / "model")
    words = [*small(tmp_path, "judged", steps=2), "--reward-model.path", model, "--reward-model.weight", "100"]
    tandem("train", *words, place=place).assert_nothing_left()
    steps = [each.event for each in read(tmp_path / "judged") if isinstance(each.event, StepFinished)]
    reinforced = [step for step in steps if step.phase == "train"]
    assert len(reinforced) == 2
    for step in reinforced:  # the environment's own are between 0 and 1
        assert step.mean_reward == pytest.approx(100 * step.metrics["reward_model_mean"], abs=1.0)
        assert abs(step.metrics["reward_model_mean"]) > 1e-3


def test_memory_that_is_handed_over_changes_no_bit(place: Path, tmp_path: Path):
    digests = []
    for name, flag in (("kept", "false"), ("handed", "true")):
        words = [*deterministic(tmp_path, name), "--engine.train.hand-over", flag, "--algorithm.kl-weight", "0.1"]
        tandem("train", *words, "--trainer.steps", "2", place=place)
        events = [each.event for each in read(tmp_path / name)]
        digests.append([event.digest for event in events if isinstance(event, WeightsPublished)])
    assert len(digests[0]) >= 2 and len(set(digests[0])) == len(digests[0]) and digests[0] == digests[1]


def test_the_log_holds_the_run(finished: tuple[Path, Child]):
    metrics = fold(read(finished[0]))
    assert metrics.finished is not None and (metrics.finished.reason, metrics.finished.step) == ("finished", 3)
    assert [(step.phase, step.step) for step in metrics.steps] == [
        *(("warmup", step) for step in (1, 2, 3)), *(("train", step) for step in (1, 2, 3)),
    ]  # fmt: skip
    assert [(each.name, each.num_tasks) for each in metrics.evaluations] == [
        ("before", 4), ("after warm-up", 4), ("after reinforcement", 4),
    ]  # fmt: skip
    assert metrics.episodes["train"].num_scored == 3 * 2 * 4
    assert metrics.sandboxes_created == metrics.sandboxes_killed == 3 * 2 * 4 + 3 * 4


def test_the_exported_model_is_the_same_in_transformers(finished: tuple[Path, Child]):
    folder = finished[0] / "model"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, start = (load_model(each, dtype=torch.float32) for each in (folder, resolve_model("tiny")))
    ids = [5, 9, 3, 77, 41, 8, 8, 60, 13, 90, 22, 31]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits_of(ours, ids), expected, atol=1e-4, rtol=0)
        assert not torch.allclose(logits_of(start, ids), expected, atol=1e-2)  # it is the trained one


def test_runs_are_listed_shown_verified_and_drawn(
    place: Path, finished: tuple[Path, Child], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(place)  # it holds ``runs``, so that runs have names
    listed = tandem("runs", "list", place=place).out.splitlines()
    (row,) = [line for line in listed if line.startswith("finished ")]
    assert row.split()[3:6] == ["finished", "3", f"{fold(read(finished[0])).phase_steps()[-1].reward:.3f}"]
    assert "after reinforcement" in said(capsys, "runs", "show", "finished")
    assert len(said(capsys, "runs", "show", "finished", "--episodes").splitlines()) == 2 + 3 * 2 * 4 + 3 * 4
    names = list(episodes(finished[0]))
    name = names[0]
    assert any(each.startswith("after-warm-up-") for each in names) and not any(" " in each for each in names)
    told = tandem("runs", "show", "finished", "--episode", name, place=place).out
    assert name in told and "list" in told and "reward" in told
    assert said(capsys, "runs", "verify", "finished").endswith("chain and episodes are whole\n")
    assert said(capsys, "runs", "curve", "finished", "--out", "one.svg") == "one.svg\n"
    assert "<svg" in (place / "one.svg").read_text()


def test_the_recipe_checks(place: Path, capsys: pytest.CaptureFixture[str]):
    out = said(capsys, "config", "check", *small(place / "runs", "checked"))
    last = out.splitlines()[-1]
    assert last.startswith("good: environment chores, model ") and last.endswith("context of 256 tokens")
    assert not (place / "runs" / "checked").exists()


# ---- a run folder that is none, or no more
def test_a_recipe_that_cannot_be_read_is_said(tmp_path: Path):
    with pytest.raises(RecordError, match="killed before it began"):
        recipe_of(tmp_path)
    recipe, origins = load(flags=["--model.path", "tiny"])
    saved = {"recipe": recipe.model_dump(mode="json"), "origins": origins}
    (tmp_path / "recipe.json").write_text(json.dumps(saved))
    assert recipe_of(tmp_path) == (recipe, origins)
    saved["recipe"]["model"]["colour"] = "red"
    (tmp_path / "recipe.json").write_text(json.dumps(saved))
    with pytest.raises(RecordError, match="model.colour") as raised:
        recipe_of(tmp_path)
    assert "another version" in raised.value.hint
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(RecordError, match="is broken"):
        recipe_of(tmp_path)


def test_a_folder_in_the_way_is_not_written_into(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    recipe, origins = load([TINY], ["--record.folder", str(tmp_path), "--record.name", "mine"])
    with pytest.raises(ConfigError, match="exists") as raised:
        train(recipe, origins)
    assert raised.value.hint == "choose another record.name"  # it is no run: there is nothing to resume
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_run_that_was_killed_before_its_first_event_begins_anew(
    place: Path, finished: tuple[Path, Child], capsys: pytest.CaptureFixture[str]
):
    folder = place / "runs" / "unborn"
    folder.mkdir(parents=True)
    recipe = json.loads((finished[0] / "recipe.json").read_text())
    recipe["recipe"]["trainer"]["steps"] = recipe["recipe"]["warmup"]["steps"] = 0
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "events.jsonl").touch()
    said(capsys, "train", "--resume", str(folder))
    metrics = fold(read(folder))
    assert metrics.run_id == "unborn" and metrics.resumes == 0 and metrics.started is not None
    assert [each.name for each in metrics.evaluations] == ["before", "after reinforcement"]


# ---- what must not stop a run
@pytest.mark.slow
def test_trouble_is_counted_under_its_name_and_stops_nothing(place: Path):
    flags = {
        "environment.name": f"{ENVIRONMENTS}:troubled", "environment.num-eval-tasks": 0, "warmup.steps": 0,
        "rollout.groups-per-step": 3, "rollout.group-size": 2, "trainer.steps": 2,
    }  # fmt: skip
    child = tandem("train", *small(place / "runs", "troubled"), *flags_of(flags), place=place)
    child.assert_nothing_left()
    metrics = fold(read(place / "runs" / "troubled"))
    assert [step.num_groups for step in metrics.phase_steps()] == [3, 3]
    failures = metrics.tool_failures
    assert failures["shell: timeout"] >= 2  # the one that hangs
    assert failures["shell: output_limit"] == 2
    assert failures["shell: timeout"] + failures["shell: nonzero_exit"] == 4  # the fork bomb ends in one of two ways
    assert failures["stubborn: timeout"] == 2 and failures["broken: raised"] == 2
    assert metrics.episode_failures == {"environment": 6, "reward_timeout": 2, "reward": 2}
    assert metrics.retried == 4  # the workflow that raises got two more attempts for each of its two episodes
    assert metrics.reward_failures == {"judge: reward_timeout": 2, "judge: reward": 2}
    assert metrics.dropped_groups == {"all_failed": 3}
    ((reason, times),) = metrics.rejected_tasks.items()
    assert times == 1 and f"task {BROKEN_TASK} of" in reason and "ZeroDivisionError: this task is broken" in reason
    assert metrics.sandbox_failures == {}
    for name in ("shell: output_limit 2", "stubborn: timeout 2", "environment 6", "reward_timeout 2", "all_failed 3"):
        assert name in child.out
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 2**20  # KiB: the gigabyte was kept nowhere


# ---- a checkpoint whose event was lost: the run was killed between the two
def saved(folder: Path, step: int) -> None:
    place = folder / "checkpoints" / f"step-{step:06d}"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": {}}))


def group(number: int, purpose: str = "train") -> GroupStarted:
    return GroupStarted(group_id=f"g{number}", task_id="t", size=1, version=0, purpose=purpose)


def published(step: int) -> WeightsPublished:
    return WeightsPublished(version=step + 1, step=step, digest="", place="", publish_s=0.0)


def test_what_the_checkpoint_holds_stays_and_what_came_after_goes(tmp_path: Path):
    evaluated = EvaluationFinished(
        name="after warm-up", step=0, num_tasks=1, num_failed=0, mean_reward=0.0, success=0.0, by_family={},
        duration_s=1.0,
    )  # fmt: skip
    reported = EngineReported(step=1, prompt_tokens=1, cached_tokens=0, generated_tokens=1, busy_s=1.0)
    saved(tmp_path, 0)
    with EventLog(tmp_path) as log:
        for event in (published(0), group(0, "after warm-up"), evaluated):
            log.emit(event)
        assert resume_log(log) == {"after warm-up"}  # it was before the checkpoint
        log.emit(group(1))
        assert resume_log(log) == {"after warm-up"}  # also when there has been rollout since
        assert [each.event for each in read(tmp_path) if each.event == group(1)] == []
        for event in (group(2), published(1), reported):
            log.emit(event)
        saved(tmp_path, 1)
        for event in (group(3), published(2)):
            log.emit(event)
        assert resume_log(log) == {"after warm-up"}
        kept = [each.event for each in read(tmp_path)]
        assert group(2) in kept and reported in kept and group(3) not in kept and published(2) not in kept
    assert fold(read(tmp_path)).resumes == 3


def test_a_checkpoint_that_cannot_be_used_is_named_and_training_does_not_begin_again_unasked(tmp_path: Path):
    with EventLog(tmp_path) as log:
        log.emit(published(0))
        _check_checkpoints(tmp_path, anew=False)  # nothing was saved: nothing is lost
        for step in (0, 1):
            saved(tmp_path, step)
            log.emit(CheckpointSaved(step=step, path="", digest="", save_s=0.0))
        (tmp_path / "checkpoints" / "step-000001" / "manifest.json").write_text("{")
        _check_checkpoints(tmp_path, anew=False)
        resume_log(log)
        (warning,) = [each.event for each in read(tmp_path) if isinstance(each.event, WarningRaised)]
        assert warning.message == "step-000001 is skipped: manifest.json is broken"
        with pytest.raises(ConfigError, match="a good checkpoint of step 0"):
            _check_checkpoints(tmp_path, anew=True)
        (tmp_path / "checkpoints" / "step-000000" / "manifest.json").unlink()
        with pytest.raises(RecordError, match=r"(?s)saved at step 0, .*step-000000: manifest.json: No such") as error:
            _check_checkpoints(tmp_path, anew=False)
        assert f"train --resume {tmp_path} --anew" in error.value.hint
        _check_checkpoints(tmp_path, anew=True)


# ---- a full disk
@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_full_disk_is_one_line_and_a_way_on(place: Path, devices: int):
    disk = place / f"disk{devices}"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        child = tandem("train", *small(disk, "full"), "--trainer.devices", str(devices), place=place, code=1)
        assert "Traceback" not in child.said
        (error,) = [line for line in child.err.splitlines() if line.startswith("error: ")]
        assert error.startswith(f"error: no space left at {disk}")
        assert "train --resume" in child.err
    finally:
        subprocess.run(["umount", str(disk)], check=True)
