"""Which tokens learn, from what."""

from __future__ import annotations

import dataclasses

import pytest
from bare_methods import GRPO

from tandem.algorithms.catalog.grpo import DR_GRPO
from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration, has_gradient, num_loss_tokens, stamp
from tandem.core.types import Episode, Failure, FailureKind, Group, Task, Trajectory, floats, ids, mask


def episode(index: int, reward: float | None) -> Episode:
    failure = None if reward is not None else Failure(kind=FailureKind.ENVIRONMENT, detail="", retryable=True)
    return Episode(
        id=f"e{index}",
        task_id="t",
        group_id="g",
        index=index,
        attempt=0,
        seed=0,
        turns=(),
        reward=reward,
        failure=failure,
    )


def trajectory(episode_id: str, flags: list[int]) -> Trajectory:
    n = len(flags)
    return Trajectory(
        episode_id=episode_id, group_id="g", token_ids=ids(range(n)), loss_mask=mask(flags),
        logprobs=floats([-1.0] * n),
        versions=ids([0] * n), num_prompt_tokens=1,
    )  # fmt: skip


def group(*rewards: float | None) -> Group:
    return Group(id="g", task=Task(id="t", messages=()), episodes=tuple(episode(i, r) for i, r in enumerate(rewards)))


def test_only_the_policys_tokens_learn_and_failed_episodes_are_left_out() -> None:
    flags = [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]  # 5 model, 7 tool, 4 model tokens
    samples = stamp(DR_GRPO, group(1.0, 0.0, None), [trajectory(f"e{i}", flags) for i in range(3)])
    assert [sample.trajectory.episode_id for sample in samples] == ["e0", "e1"]
    for sample, advantage in zip(samples, (0.5, -0.5), strict=True):
        assert num_loss_tokens(sample) == 9
        assert list(sample.rl_weights) == [float(flag) for flag in flags]
        assert list(sample.advantages) == [flag * advantage for flag in flags]
        assert not any(sample.ce_weights)


def test_every_branch_of_an_episode_gets_its_advantage() -> None:
    samples = stamp(
        DR_GRPO, group(1.0, 0.0), [trajectory("e0", [0, 1]), trajectory("e0", [0, 0, 1]), trajectory("e1", [0, 1])]
    )
    assert [list(sample.advantages)[-1] for sample in samples] == [0.5, 0.5, -0.5]


def test_flat_groups_have_no_gradient_unless_a_penalty_pulls() -> None:
    (sample, _) = stamp(GRPO, group(1.0, 1.0), [trajectory("e0", [0, 1]), trajectory("e1", [0, 1])])
    assert num_loss_tokens(sample) == 1
    assert not has_gradient(GRPO, sample)
    assert has_gradient(dataclasses.replace(GRPO, kl_weight=0.1), sample)


def test_demonstrations_learn_by_cross_entropy() -> None:
    sample = demonstration("d", ids([1, 2, 3]), mask([0, 0, 1]))
    assert list(sample.ce_weights) == [0.0, 0.0, 1.0] and not any(sample.rl_weights)
    assert has_gradient(SFT, sample) and sample.trajectory.num_prompt_tokens == 2


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="first token"):
        demonstration("d", ids([1, 2]), mask([1, 1]))
    with pytest.raises(ValueError, match="e9"):
        stamp(GRPO, group(1.0), [trajectory("e9", [0, 1])])
    with pytest.raises(ValueError, match="no credit"):
        stamp(SFT, group(1.0), [])
