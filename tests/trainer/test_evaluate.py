"""Episodes to an evaluation's result."""

from __future__ import annotations

from tandem.core.types import Episode, Failure, FailureKind, Task
from tandem.trainer.evaluate import summarise


def episode(task: str, reward: float | None) -> Episode:
    failure = None if reward is not None else Failure(kind=FailureKind.SANDBOX, detail="", retryable=True)
    return Episode(
        id=task, task_id=task, group_id=task, index=0, attempt=0, seed=0, turns=(), reward=reward, failure=failure
    )


def tasks(**families: str) -> list[Task]:
    return [Task(id=name, messages=(), private={"family": family}) for name, family in families.items()]


def test_failed_episodes_are_counted_and_in_no_mean() -> None:
    episodes = [episode("a", 1.0), episode("b", 0.5), episode("c", None), episode("d", 1.0)]
    of = tasks(a="x", b="x", c="y", d="y")
    result = summarise(episodes, of, name="held-out", step=3, duration_s=1.5)
    assert (result.num_tasks, result.num_failed, result.step, result.name) == (4, 1, 3, "held-out")
    assert result.mean_reward == 2.5 / 3 and result.success == 2 / 3
    assert result.by_family == {"x": 0.5, "y": 1.0}


def test_nothing_scored_is_no_success_rate() -> None:
    result = summarise([episode("a", None)], [], name="e", step=0, duration_s=0.0)
    assert result.success is None and result.mean_reward is None and result.by_family == {}
