"""Two runs that are disturbed all the time: one is killed ten times, one is interrupted by signals five times.

They take the most time of these tests, nearly all of it in starting processes, so they go on side by side. What must
hold at each disturbance is asserted here; what must hold at the end is in the tests.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from app_pieces import ENVIRONMENTS, Child, Events, deterministic, event, flags_of, small, tandem

from tandem.app.supervise import INTERRUPTED
from tandem.core.events import RunFinished, StepFinished
from tandem.record.replay import read
from tandem.record.summary import summarise_run

Moment = Callable[[Path, Events], Callable[[], bool]]


def after(kind: str, times: int = 1, **fields: object) -> Moment:
    return lambda folder, events: events.happened(event(kind, **fields), times=times)


def appears(*names: str) -> Moment:
    """One of these comes (again) into the run folder."""

    def moment(folder: Path, events: Events) -> Callable[[], bool]:
        there = {name for name in names if (folder / name).exists()}
        return lambda: any((folder / name).exists() for name in names if name not in there)

    return moment


# Each process is killed at its moment, and a random while after it (ms at most): that hits all that follows.
MOMENTS: list[tuple[str, Moment, int]] = [
    ("first evaluation", after("EpisodeFinished", purpose="before"), 10),
    ("warm-up", after("StepFinished", phase="warmup"), 40),
    ("warmed evaluation", after("SandboxCreated", 6), 200),
    ("checkpoint 0 is being written", appears("checkpoints/.unfinished-step-000000"), 15),
    ("checkpoint 0 is there, its event perhaps not", appears("checkpoints/step-000000"), 0),
    ("rollout", after("EpisodeStarted", 5), 300),
    ("end of rollout, training", after("GroupFinished", 2), 60),
    ("checkpoint 1 is being written", appears("checkpoints/.unfinished-step-000001"), 15),
    ("rollout of a later step", after("TurnFinished", 24), 200),
    ("last evaluation or export", after("EpisodeFinished", 1, purpose="after reinforcement"), 60),
]


def killed_again_and_again(place: Path) -> list[str]:
    """The run ``killed``, up to its good end; returns a line for each kill."""
    folder = place / "runs" / "killed"
    draw = random.Random(7)
    lines = []
    for number, (name, moment, most_ms) in enumerate(MOMENTS):
        words = ["--resume", str(folder)] if number else deterministic(place / "runs", "killed")
        happened = moment(folder, Events(folder).skip())
        child = Child(["train", *words], place)
        child.until(happened)
        time.sleep(draw.uniform(0, most_ms) / 1000)
        child.signal(signal.SIGKILL)
        child.wait(-signal.SIGKILL)
        child.assert_nothing_left()
        assert summarise_run(folder)  # a killed run can be looked at
        lines.append(f"killed at {name:<46} last event {type(read(folder)[-1].event).__name__}")
    tandem("train", "--resume", str(folder), place=place).assert_nothing_left()
    return lines


END_S = 30.0  # the promise is 5 s; this machine may be busy

# What happens, the signals that come then, and the phase whose step must not have ended.
INTERRUPTIONS = [
    ("in a warm-up step", event("EvaluationFinished", name="before"), 1, [signal.SIGINT], "warmup"),
    ("in rollout", event("EpisodeFinished", purpose="train"), 1, [signal.SIGINT], "train"),
    ("in a training step", event("GroupFinished", purpose="train"), 2, [signal.SIGINT], "train"),
    ("in rollout, by SIGTERM", event("EpisodeStarted"), 1, [signal.SIGTERM], "train"),
    ("twice", event("GroupFinished", purpose="train"), 2, [signal.SIGINT, signal.SIGINT], "train"),
]


def words_of(place: Path) -> list[str]:
    """Steps long enough to be met by a signal."""
    flags = {
        "environment.name": f"{ENVIRONMENTS}:dense", "warmup.steps": 2, "warmup.batch-size": 256,
        "rollout.group-size": 8, "rollout.max-turn-tokens": 64, "trainer.steps": 1,
    }  # fmt: skip
    return ["train", *small(place / "runs", "interrupted"), *flags_of(flags)]


def interrupted_again_and_again(place: Path) -> list[str]:
    """The run ``interrupted``, up to its good end; returns a line for each interruption."""
    folder = place / "runs" / "interrupted"
    lines = []
    for number, (name, happens, times, signals, phase) in enumerate(INTERRUPTIONS):
        events = Events(folder).skip()
        child = Child(["train", "--resume", str(folder)] if number else words_of(place), place)
        child.until(events.happened(happens, times=times))
        took_s = interrupt(child, signals)
        child.assert_nothing_left()
        log = read(folder)
        ended = log[-1].event
        assert isinstance(ended, RunFinished) and ended.reason == "interrupted"
        # A computation that takes longer than the end may, as on a busy machine, is left behind.
        assert ended.detail in {"ended at once", *(["stopped by a signal"] if len(signals) == 1 else [])}
        assert not any(isinstance(each.event, StepFinished) and each.event.phase == phase for each in log), name
        assert f"train --resume {folder}" in child.err and "stopping: ending episodes and boxes" in child.err
        assert "Traceback" not in child.err
        lines.append(f"interrupted {name:<24} ended after {took_s:.2f} s ({ended.detail})")
    tandem("train", "--resume", str(folder), place=place).assert_nothing_left()
    return lines


def interrupt(child: Child, signals: Sequence[signal.Signals]) -> float:
    """Send them and wait for the end; returns how long that took, in seconds."""
    started = time.monotonic()
    for place, number in enumerate(signals):
        if place:
            child.until(lambda: "stopping" in child.err)
        child.signal(number)
    child.wait(INTERRUPTED)
    took_s = time.monotonic() - started
    assert took_s < END_S
    return took_s
