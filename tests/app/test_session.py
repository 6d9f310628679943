"""Phases of a run, and its resumption: ten kills at any moment, and the result is that of the run nobody disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from app_pieces import said

from tandem.record.metrics import fold
from tandem.record.replay import read


def counted(folder: Path) -> tuple[object, ...]:
    """What the log counts, apart from times and places."""
    metrics = fold(read(folder))
    ended = [each.event for each in read(folder) if each.event.__class__.__name__ == "EpisodeFinished"]
    return (
        sorted((each.episode_id, each.purpose, each.reward, each.num_tokens, each.failure) for each in ended),
        [(step.phase, step.step, step.loss, step.grad_norm, step.reward, step.num_episodes) for step in metrics.steps],
        [(each.name, each.step, each.num_tasks, each.mean_reward) for each in metrics.evaluations],
        {name: (sums.num_scored, sums.num_failed) for name, sums in metrics.episodes.items()},
        metrics.tool_failures, metrics.episode_failures, metrics.reward_failures, metrics.dropped_groups,
        metrics.finished and metrics.finished.reason,
    )  # fmt: skip


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_deterministic_run_repeats_bit_by_bit(repeated: Path, uninterrupted: Path):
    assert weights(repeated) == weights(uninterrupted)
    assert counted(repeated) == counted(uninterrupted)
    start = fold(read(repeated)).phase_steps()
    assert len(start) == 3 and all(step.grad_norm for step in start)  # it did learn: equal bits mean something


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_count_nothing_twice(
    place: Path, uninterrupted: Path, killed: list[str], capsys: pytest.CaptureFixture[str]
):
    with capsys.disabled():
        print("\n" + "\n".join(killed))
    assert len(killed) == 10
    folder = place / "runs" / "killed"
    assert said(capsys, "runs", "verify", str(folder)).endswith("chain and episodes are whole\n")
    assert weights(folder) == weights(uninterrupted)
    assert counted(folder) == counted(uninterrupted)
    assert fold(read(folder)).resumes in (9, 10)  # at the last kill all may have been done but the picture
    assert sorted(os.listdir(folder / "checkpoints")) == sorted(os.listdir(uninterrupted / "checkpoints"))
    assert f"run {folder} is finished" in said(capsys, "train", "--resume", str(folder))
