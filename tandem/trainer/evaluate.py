"""Episodes to the result of an evaluation: the same road as training, no learning.

Invariant: a failed episode is counted as failed and is in no mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.events import EvaluationFinished
from tandem.core.types import Episode, Task

SUCCESS = 1.0  # an episode succeeds when its reward reaches this


def summarise(
    episodes: Sequence[Episode], tasks: Sequence[Task], *, name: str, step: int, duration_s: float
) -> EvaluationFinished:
    """Success and mean reward over all scored episodes, and success by family (a task's private ``family``)."""
    families = {task.id: str(task.private.get("family", "")) for task in tasks}
    scored = [(families.get(episode.task_id, ""), episode.reward) for episode in episodes if episode.reward is not None]
    by_family: dict[str, list[float]] = {}
    for family, reward in scored:
        if family:
            by_family.setdefault(family, []).append(float(reward >= SUCCESS))
    return EvaluationFinished(
        name=name,
        step=step,
        num_tasks=len({episode.task_id for episode in episodes}),
        num_failed=len(episodes) - len(scored),
        mean_reward=sum(reward for _, reward in scored) / len(scored) if scored else None,
        success=sum(reward >= SUCCESS for _, reward in scored) / len(scored) if scored else None,
        by_family={family: sum(wins) / len(wins) for family, wins in sorted(by_family.items())},
        duration_s=duration_s,
    )
