"""Signals: a run ends soon, says how to go on, leaves nothing, and goes on. Also when the work does not listen."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from app_pieces import said
from disturbances import INTERRUPTIONS

from tandem.app.supervise import FAILED, FINISHED, INTERRUPTED, supervise
from tandem.core.errors import EngineError
from tandem.record.metrics import fold
from tandem.record.replay import read


@pytest.mark.slow
def test_a_signal_ends_a_run_soon_and_the_run_goes_on(
    place: Path, interrupted: list[str], capsys: pytest.CaptureFixture[str]
):
    with capsys.disabled():
        print("\n" + "\n".join(interrupted))
    folder = place / "runs" / "interrupted"
    assert said(capsys, "runs", "verify", str(folder)).endswith("chain and episodes are whole\n")
    metrics = fold(read(folder))
    assert [(step.phase, step.step) for step in metrics.steps] == [("warmup", 1), ("warmup", 2), ("train", 1)]
    assert [each.name for each in metrics.evaluations] == ["before", "after warm-up", "after reinforcement"]
    assert metrics.episodes["train"].num_scored == 16 and metrics.resumes == len(INTERRUPTIONS)


# ---- without a model: work that does not listen
DEAF = """
import asyncio, sys, time
from tandem.app.supervise import supervise

async def work():
    print("begun", flush=True)
    {work}

print(supervise(work, lambda: print("last words", flush=True), stopping="ending the nap"), flush=True)
{after}
"""


@pytest.mark.parametrize(
    ("work", "after", "signals", "ends", "last_words"),
    [
        ("await asyncio.sleep(60)", "", [signal.SIGINT], "(130, 'stopped by a signal')", False),
        ("await asyncio.sleep(60)", "", [signal.SIGTERM], "(130, 'stopped by a signal')", False),
        ("time.sleep(60)", "", [signal.SIGINT], "", True),
        ("time.sleep(60)", "", [signal.SIGTERM, signal.SIGINT], "", True),
        ("await asyncio.to_thread(time.sleep, 60)", "", [signal.SIGINT, signal.SIGINT], "", True),
        ("await asyncio.sleep(60)", "time.sleep(60)", [signal.SIGINT], "(130, 'stopped by a signal')", True),
    ],
)
def test_work_that_does_not_listen_ends_all_the_same(
    work: str, after: str, signals: Sequence[signal.Signals], ends: str, last_words: bool
):
    program = [sys.executable, "-c", DEAF.format(work=work, after=after)]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "begun\n"
    started = time.monotonic()
    for place, number in enumerate(signals):
        child.send_signal(number)
        while not place and (line := child.stderr.readline()) and "stopping: ending the nap" not in line:
            pass
    out = child.communicate(timeout=300)[0]
    assert time.monotonic() - started < 50  # not the nap's 60
    assert (ends in out, "last words" in out) == (True, last_words)
    assert child.returncode == (INTERRUPTED if last_words else 0)


def test_every_end_has_a_code_and_a_reason(capsys: pytest.CaptureFixture[str]):
    async def well() -> None: ...

    async def known() -> None:
        raise EngineError("no engine", hint="start it")

    async def unknown() -> None:
        raise LookupError("nobody thought of this")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ends = [supervise(work, lambda: None, stopping="") for work in (well, known, unknown)]
    assert ends == [
        (FINISHED, ""), (FAILED, "no engine\nhint: start it"), (FAILED, "LookupError: nobody thought of this"),
    ]  # fmt: skip
    assert "in unknown" in capsys.readouterr().err  # where it is to be looked for
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
