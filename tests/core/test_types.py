"""Streams that run together have one length; a failure has no reward."""

import pytest

from tandem.core.types import (
    Completion,
    Episode,
    Failure,
    FailureKind,
    FinishReason,
    Sample,
    Trajectory,
    floats,
    ids,
    mask,
)

STREAMS = {"token_ids": ids([1, 2, 3]), "loss_mask": mask([0, 1, 1]), "logprobs": floats([0, -1, -2]),
           "versions": ids([-1, 0, 0])}  # fmt: skip


def trajectory(**changed):
    return Trajectory(episode_id="e", group_id="g", num_prompt_tokens=1, **(STREAMS | changed))


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "logprobs", "versions"])
def test_a_stream_of_another_length_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"trajectory of e: streams differ in length: .*'{name}': 2"):
        trajectory(**{name: STREAMS[name][:2]})


def test_optional_streams_are_checked_when_they_are_there():
    good = floats([0, 0, 0])
    Sample(trajectory=trajectory(), advantages=good, rl_weights=good, ce_weights=good)
    with pytest.raises(ValueError, match="'reference_logprobs': 1"):
        Sample(trajectory=trajectory(), advantages=good, rl_weights=good, ce_weights=good,
               reference_logprobs=floats([0]))  # fmt: skip


def test_a_completion_has_a_log_probability_for_each_token():
    with pytest.raises(ValueError, match="completion of r"):
        Completion(request_id="r", token_ids=ids([1]), logprobs=floats(), versions=ids([0]),
                   finish_reason=FinishReason.STOP)  # fmt: skip


def test_a_failed_episode_carries_no_reward():
    failure = Failure(kind=FailureKind.SANDBOX, detail="", retryable=True)
    with pytest.raises(ValueError, match="carries no reward"):
        Episode(id="e", task_id="t", group_id="g", index=0, attempt=0, seed=0, turns=(), reward=0.0, failure=failure)
