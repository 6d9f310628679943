"""What the terminal shows, with and without one."""

import io

import pytest
from rich.console import Console
from run_pieces import envelopes, episode_events, finished_episode, small_run, started, step

from tandem.core.events import RunFinished, RunResumed
from tandem.record.metrics import fold
from tandem.record.sinks import console as module
from tandem.record.sinks.console import ConsoleSink, sparkline


def shown(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, height=40)
    with ConsoleSink("run-1", total_steps=2, episodes_per_step=2, console=console) as sink:
        for envelope in envelopes(small_run()):
            sink(envelope)
    return out.getvalue()


def test_plain_lines_say_each_step_and_evaluation():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "run run-1"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2 and "reward 0.500" in steps[0] and "tool errors 1/2" in steps[0] and "failed 1" in steps[1]
    (told,) = [line for line in lines if line.startswith("evaluation before: ")]
    assert "success 0.250 of 3 scored, 1 of 4 failed, files 0.25, " in told  # failed ones are in no mean
    assert lines[-1] == "finished after step 2"


def test_the_live_panel_holds_progress_and_time():
    text = shown(terminal=True)
    assert "2/2 steps" in text and "rollout 60%" in text and "held-out" in text


def test_bars_run_from_least_to_largest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" or sparkline([0.0, 0.5, 1.0])[::2] == "▁█"
    assert len(sparkline([1.0] * 100)) == 48


@pytest.fixture
def said(monkeypatch):
    """The plain lines that events give when every one of them may give one."""
    monkeypatch.setattr(module, "QUIET_S", -1.0)

    def lines(events, *, total_steps=5, **options):
        out = io.StringIO()
        console = Console(file=out, force_terminal=False, width=120)
        with ConsoleSink("r", total_steps=total_steps, episodes_per_step=24, console=console, **options) as sink:
            for envelope in envelopes(events):
                sink(envelope)
        return out.getvalue().splitlines()[1:]

    return lines


def test_failed_attempts_are_not_counted_among_the_wanted_episodes(said):
    (*_, last) = said([*episode_events("a"), finished_episode("b", failure="sandbox"), *episode_events("c")[:5]])
    assert last == "step 1/5: 2 episodes scored (24 wanted), 1 failed, 0 running"


def test_a_resumed_run_counts_from_its_checkpoint(said):
    resumed = RunResumed(step=1, keep_sequence=1, checkpoint="")
    numbers = fold(envelopes([started(), step(1), resumed]))  # step 2 was made, and is to be made again
    lines = said([resumed, *episode_events("a")], resumed=lambda: numbers)
    assert lines[0] == "resumed at step 1" and lines[-1].startswith("step 2/5: 1 episodes scored")


def test_an_evaluation_alone_ends_after_no_step(said):
    assert said([RunFinished(step=0, reason="finished")], total_steps=0) == ["finished"]
    assert said([RunFinished(step=5, reason="finished")]) == ["finished after step 5"]
