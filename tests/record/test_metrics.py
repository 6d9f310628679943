"""Events to numbers: failures by name, means without them, absence as None."""

import pytest
from run_pieces import envelopes, episode_events, small_run, started, step

from tandem.core.events import RunResumed
from tandem.record.metrics import RunMetrics, fold


def test_a_small_run():
    metrics = fold(envelopes(small_run()))
    assert metrics.run_id == "r" and metrics.finished is not None
    assert [point.reward for point in metrics.phase_steps()] == [0.5, 1.0]
    first, second = metrics.phase_steps()
    assert (first.num_episodes, first.num_failed, second.num_episodes, second.num_failed) == (2, 0, 2, 1)
    assert (first.tool_calls, first.tool_failures) == (2, 1)  # the evaluation's call is not the step's
    assert first.sampled_tokens == 14 and first.tokens_per_s == 1.4
    assert metrics.tool_failures == {"shell: timeout": 1} and metrics.tool_calls == {"shell": 5}
    assert metrics.episode_failures == {"sandbox": 1} and metrics.retried == 1
    assert metrics.cached_tokens == 40 and metrics.generated_tokens == 14
    assert not metrics.in_flight


def test_failed_attempts_are_in_no_mean():
    sums = fold(envelopes(small_run())).episodes["train"]
    assert (sums.num_scored, sums.num_failed) == (3, 1)
    assert sums.mean(sums.reward) == pytest.approx(2 / 3)


def test_shares_of_time_add_up():
    metrics = fold(envelopes(small_run()))
    assert metrics.shares() == {"rollout": 0.6, "train": 0.3, "other": pytest.approx(0.1)}
    shares = metrics.episodes["train"].shares()
    assert shares == {"model": 0.4, "sandbox": 0.3, "reward": 0.1, "idle": pytest.approx(0.2)}


def test_nothing_measured_is_none_not_zero():
    metrics = fold(envelopes([started(), step(1, reward=None, loss=None)]))
    (point,) = metrics.phase_steps()
    assert point.reward is None and point.mean_turns is None and point.tokens_per_s is None
    assert RunMetrics().elapsed_s is None and RunMetrics().shares() == {}


def test_warm_up_steps_are_no_reinforcement():
    metrics = fold(envelopes([started(), step(1, phase="warmup", reward=None), step(1)]))
    assert len(metrics.phase_steps("warmup")) == len(metrics.phase_steps()) == 1
    assert metrics.steps_s == 10.0


def test_a_resume_forgets_the_episodes_that_were_in_flight():
    begun = episode_events("lost")[:3]
    again = episode_events("e1")
    events = [started(), *begun, RunResumed(step=0, keep_sequence=0, checkpoint=""), *again, step(1)]
    metrics = fold(envelopes(events))
    assert not metrics.in_flight and metrics.resumes == 1
    assert metrics.phase_steps()[0].sampled_tokens == 7
