"""What the terminal shows, with and without one."""

import io

from rich.console import Console
from run_pieces import envelopes, small_run

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
