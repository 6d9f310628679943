"""``tandem eval``: a run's model on held-out tasks, by the same road, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from app_pieces import ENVIRONMENTS, Child, said, tandem

from tandem.app.evaluate import evaluate
from tandem.config.load import load
from tandem.core.errors import ConfigError
from tandem.record.metrics import fold
from tandem.record.replay import read


def test_a_run_is_evaluated_as_it_was_at_its_end(
    place: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
):
    child = tandem("eval", "--model", str(uninterrupted), place=place)
    (folder,) = (place / "runs" / "evaluations").iterdir()
    metrics = fold(read(folder))
    (made,), last = metrics.evaluations, fold(read(uninterrupted)).evaluations[-1]
    assert (made.num_tasks, made.mean_reward, made.by_family) == (4, last.mean_reward, last.by_family)
    assert metrics.finished is not None and metrics.finished.reason == "finished"
    assert "held-out" in child.out and child.out.rstrip().endswith(f"runs show {folder} --episodes")
    child.assert_nothing_left()
    assert "evaluations" not in said(capsys, "runs", "list", str(place / "runs"))  # they are no runs


def test_nothing_to_evaluate_is_said():
    recipe, _ = load(flags=["--model.path", "tiny", "--environment.num-eval-tasks", "0"])
    with pytest.raises(ConfigError, match="num_eval_tasks is 0"):
        evaluate(recipe)
    words = ["--model.path", "tiny", "--environment.name", f"{ENVIRONMENTS}:troubled"]
    with pytest.raises(ConfigError, match="has no evaluation tasks"):
        evaluate(load(flags=words)[0])


def test_a_run_without_a_model_says_so(
    finished: tuple[Path, Child], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "recipe.json").write_text((finished[0] / "recipe.json").read_text())
    (tmp_path / "events.jsonl").touch()
    assert said(capsys, "eval", "--model", str(tmp_path), code=1) == (
        f"error: run {tmp_path} has no model yet\nhint: finish it: tandem train --resume {tmp_path}\n"
    )
