"""Reference streams reach their samples, and a reward model's scores their episodes."""

from __future__ import annotations

import asyncio

import pytest
from bare_methods import GRPO

from tandem.config.sections.engine import TrainSection
from tandem.core.types import FailureKind
from tandem.trainer.batcher import Batcher
from tandem.trainer.scoring import Judge, mean_verdict, with_reference
from tests.trainer.pieces import CountingEngine, MemorySink, record


def test_every_sample_gets_its_own_stream() -> None:
    samples = (
        Batcher(GRPO, TrainSection(), staleness=0, sink=MemorySink())
        .admit([record("a", [1.0, 0.0])], version=0)
        .samples
    )
    scored = asyncio.run(with_reference(samples, CountingEngine().score))
    assert [len(s.reference_logprobs or ()) for s in scored] == [4, 5]
    assert [s.trajectory for s in scored] == [s.trajectory for s in samples]


def test_a_missing_stream_is_an_error() -> None:
    samples = (
        Batcher(GRPO, TrainSection(), staleness=0, sink=MemorySink())
        .admit([record("a", [1.0, 0.0])], version=0)
        .samples
    )

    async def short(trajectories):
        return (await CountingEngine().score(trajectories))[:1]

    with pytest.raises(ValueError, match="zip"):
        asyncio.run(with_reference(samples, short))


def judged(values, *, lose: int | None = None):
    """A group with rewards 1, none and 0; the trajectory of the episode ``lose`` is not there."""
    group, trajectories = record("a", [1.0, None, 0.0])
    kept = tuple(each for number, each in enumerate(trajectories) if number != lose)

    async def scores(asked):
        assert [each.episode_id for each in asked] == [each.episode_id for each in kept]
        return values

    return asyncio.run(Judge(scores, 2.0).judge([(group, kept)]))


def test_a_reward_model_adds_to_the_rewards_that_are_there() -> None:
    records = judged([0.25, -0.5])
    ((group, trajectories),) = records
    assert [episode.reward for episode in group.episodes] == [1.5, None, -1.0] and len(trajectories) == 2
    assert [[(s.name, s.value, s.weight) for s in e.scores if s.name == "reward_model"] for e in group.episodes] == [
        [("reward_model", 0.25, 2.0)], [], [("reward_model", -0.5, 2.0)],
    ]  # fmt: skip
    assert mean_verdict(records) == {"reward_model_mean": -0.125}
    admitted = Batcher(GRPO, TrainSection(), staleness=0, sink=MemorySink()).admit(records, version=0)
    assert admitted.mean_reward == 0.25


@pytest.mark.parametrize(("values", "lose", "said"), [([0.25], 0, "no tokens"), ([float("nan"), 0.25], None, "nan")])
def test_what_it_cannot_judge_fails_by_name(values, lose, said) -> None:
    ((group, _),) = judged(values, lose=lose)
    episode = group.episodes[0]
    assert episode.reward is None and episode.failure is not None
    assert episode.failure.kind is FailureKind.REWARD_MISSING and said in episode.failure.detail
    assert group.episodes[2].reward == 0.5


def test_a_missing_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        judged([0.25])
