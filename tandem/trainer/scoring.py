"""What groups and samples need before they are trained on: a reward model's scores; log-probabilities of reference and
old weights, values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence

from tandem.core.types import Episode, Failure, FailureKind, Floats, Group, Sample, Trajectory
from tandem.core.types import Score as Verdict

Score = Callable[[Sequence[Trajectory]], Awaitable[list[Floats]]]
NAME = "reward_model"  # of the verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Judge:
    """A reward model: ``scores`` gives one number a trajectory, which counts ``weight`` times."""

    scores: Callable[[Sequence[Trajectory]], Awaitable[list[float]]]
    weight: float

    async def judge(
        self, records: Sequence[tuple[Group, tuple[Trajectory, ...]]]
    ) -> list[tuple[Group, tuple[Trajectory, ...]]]:
        """The groups with its verdict beside the environment's, and in each reward. An episode is judged by its last
        trajectory; one with a reward and nothing to judge fails by name."""
        last = {each.episode_id: each for _, trajectories in records for each in trajectories}
        wanted = [
            episode.id for group, _ in records for episode in group.episodes
            if episode.reward is not None and episode.id in last
        ]  # fmt: skip
        values = dict(zip(wanted, await self.scores([last[each] for each in wanted]), strict=True))
        return [
            (
                dataclasses.replace(
                    group, episodes=tuple(self._judged(each, values.get(each.id)) for each in group.episodes)
                ),
                trajectories,
            )
            for group, trajectories in records
        ]

    def _judged(self, episode: Episode, value: float | None) -> Episode:
        if episode.reward is None:
            return episode
        if value is None or not math.isfinite(value):
            detail = "no tokens for the reward model" if value is None else f"the reward model's score is {value}"
            failure = Failure(kind=FailureKind.REWARD_MISSING, detail=detail, retryable=False)
            return dataclasses.replace(episode, reward=None, failure=failure)
        return dataclasses.replace(
            episode,
            scores=(*episode.scores, Verdict(name=NAME, value=value, weight=self.weight)),
            reward=episode.reward + self.weight * value,
        )


def mean_verdict(records: Sequence[tuple[Group, tuple[Trajectory, ...]]]) -> dict[str, float]:
    """The metric of a step's judged episodes; empty where none was."""
    values = [
        score.value for group, _ in records for episode in group.episodes for score in episode.scores
        if score.name == NAME and score.value is not None
    ]  # fmt: skip
    return {f"{NAME}_mean": math.fsum(values) / len(values)} if values else {}


async def with_reference(samples: Sequence[Sample], score: Score) -> list[Sample]:
    """The samples with the reference's log-probability of every token; ``score`` holds the frozen weights."""
    streams = await score([sample.trajectory for sample in samples])
    return [
        dataclasses.replace(sample, reference_logprobs=stream) for sample, stream in zip(samples, streams, strict=True)
    ]


async def with_old(samples: Sequence[Sample], score: Score) -> list[Sample]:
    """The samples with the log-probability of every token under the weights that the step begins with."""
    streams = await score([sample.trajectory for sample in samples])
    return [dataclasses.replace(sample, old_logprobs=stream) for sample, stream in zip(samples, streams, strict=True)]


async def with_values(samples: Sequence[Sample], values: Score) -> list[Sample]:
    """The samples with a critic's value of what comes before every token."""
    streams = await values([sample.trajectory for sample in samples])
    return [dataclasses.replace(sample, values=stream) for sample, stream in zip(samples, streams, strict=True)]
