"""A run on the terminal: a live panel where there is a terminal, plain lines where there is none.

Owns: what is shown while a run goes on. Refuses: changing anything. Invariant: hears events only; showing them costs
the run nothing that it waits for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.core.events import (
    DataLoaded,
    Envelope,
    EvaluationFinished,
    GroupStarted,
    RunFinished,
    RunResumed,
    StepFinished,
    WaitStalled,
    WarningRaised,
)
from tandem.record.metrics import TRAIN, WARMUP, RunMetrics, StepPoint
from tandem.record.summary import number

QUIET_S = 2.0  # without a terminal: after this long without a line, progress gets one
BARS = " ▁▂▃▄▅▆▇█"
REFRESH_HZ = 2.0


class ConsoleSink:
    """Listens to a log: ``with ConsoleSink(...) as sink: log.listen(sink)``.

    ``resumed`` reads the numbers of a run that goes on, once it has said from where.
    """

    def __init__(
        self,
        title: str,
        *,
        total_steps: int,
        episodes_per_step: int,
        warmup_steps: int = 0,
        resumed: Callable[[], RunMetrics] | None = None,
        console: Console | None = None,
    ) -> None:
        self._title = title
        self._total_steps = total_steps
        self._episodes_per_step = episodes_per_step
        self._warmup_steps = warmup_steps
        self._metrics = RunMetrics()
        self._resumed = resumed
        self._console = console or Console(file=sys.stderr)
        self._guard = threading.Lock()
        self._live: Live | None = None
        self._last_line = time.monotonic()
        self._eval_done = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=REFRESH_HZ, transient=False
            )
            self._live.start()
        else:
            self._line(f"run {self._title}")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, envelope: Envelope) -> None:
        """Hear one event."""
        with self._guard:
            before = self._metrics.purpose
            if self._resumed is not None and isinstance(envelope.event, RunResumed):
                self._metrics = self._resumed()  # what came after the checkpoint does not count any more
            else:
                self._metrics.add(envelope)
            if isinstance(envelope.event, GroupStarted) and envelope.event.purpose != before:
                self._eval_done = self._evaluated()
        if self._live is None:
            self._plain(envelope, before)

    # ---- without a terminal
    def _plain(self, envelope: Envelope, purpose_before: str) -> None:
        match envelope.event:
            case StepFinished():
                self._line(self._step_line(self._metrics.steps[-1]))
            case EvaluationFinished() as event:
                failed = f", {event.num_failed} of {event.num_tasks} failed" if event.num_failed else ""
                families = "".join(f", {name} {value:.2f}" for name, value in event.by_family.items())
                self._line(
                    f"evaluation {event.name}: success {number(event.success)} of "
                    f"{event.num_tasks - event.num_failed} scored{failed}{families}, {event.duration_s:.1f} s"
                )
            case GroupStarted() as event if event.purpose not in (purpose_before, TRAIN):
                self._line(f"evaluation {event.purpose} ...")
            case WaitStalled() as event:
                self._line(f"waiting for {event.waited_s:.0f} s ({event.who}): {', '.join(event.missing[:6])}")
            case WarningRaised() as event:
                self._line(f"warning ({event.where}): {event.message}")
            case DataLoaded() as event:
                reasons = "".join(f", {count} {reason}" for reason, count in event.dropped.items())
                files = ", ".join(event.files[:3]) + (f" and {len(event.files) - 3} more" if event.files[3:] else "")
                self._line(f"data: {event.num_kept} of {event.num_rows} rows kept{reasons} ({files})")
            case RunResumed() as event:
                self._line(f"resumed at step {event.step}")
            case RunFinished() as event:
                self._line(f"{event.reason} after step {event.step}" if self._total_steps else event.reason)
            case _ if time.monotonic() - self._last_line > QUIET_S:
                self._line(self._progress_text())

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _step_line(self, point: StepPoint) -> str:
        if point.phase == WARMUP:
            return (
                f"warm-up {point.step}/{self._warmup_steps}  loss {number(point.loss)}  "
                f"{point.num_loss_tokens} tokens  {point.total_s:.1f} s"
            )
        if point.reward is None and point.mean_turns is None and point.num_loss_tokens:  # learned from data
            return (
                f"step {point.step}/{self._total_steps}  loss {number(point.loss)}  "
                f"grad {number(point.grad_norm, '.2f')}  {point.num_loss_tokens} tokens  {point.total_s:.1f} s"
            )
        failed = f"  failed {point.num_failed}" if point.num_failed else ""
        return (
            f"step {point.step}/{self._total_steps}  reward {number(point.reward)}  loss {number(point.loss)}  "
            f"grad {number(point.grad_norm, '.2f')}  turns {number(point.mean_turns, '.1f')}  "
            f"tokens {number(point.mean_tokens, '.0f')}  tool errors {point.tool_failures}/{point.tool_calls}{failed}  "
            f"{number(point.tokens_per_s, '.0f')} tok/s  {point.total_s:.1f} s "
            f"(rollout {point.rollout_s:.1f}, train {point.train_s:.1f})"
        )

    # ---- with a terminal
    def _panel(self) -> Panel:
        with self._guard:
            return Panel(
                Group(self._progress(), self._steps(), self._where_time_goes()),
                title=f"tandem  {self._title}",
                title_align="left",
            )

    def _evaluated(self) -> int:
        sums = self._metrics.episodes.get(self._metrics.purpose)
        return sums.num_scored + sums.num_failed if sums is not None else 0

    def _progress_text(self) -> str:
        metrics = self._metrics
        running = len(metrics.in_flight)
        if metrics.purpose not in ("", TRAIN):
            done = self._evaluated() - self._eval_done
            return f"evaluation {metrics.purpose}: {done} episodes done, {running} running"
        steps = metrics.phase_steps(TRAIN)
        if not metrics.purpose:
            return "starting"
        step = (steps[-1].step if steps else 0) + 1
        if step > self._total_steps:
            return "ending"
        since = metrics.since_step
        failed = f", {since.num_failed} failed" if since.num_failed else ""
        wanted = f"{since.num_scored} episodes scored ({self._episodes_per_step} wanted)"
        return f"step {step}/{self._total_steps}: {wanted}{failed}, {running} running"

    def _progress(self) -> Table:
        metrics = self._metrics
        steps = metrics.phase_steps(TRAIN)
        grid = Table.grid(padding=(0, 2))
        if self._total_steps:
            grid.add_row("reinforcement", ProgressBar(total=self._total_steps, completed=len(steps), width=40),
                         f"{len(steps)}/{self._total_steps} steps")  # fmt: skip
            done = metrics.since_step.num_scored if metrics.purpose == TRAIN else 0
        else:
            done = self._evaluated() - self._eval_done
        title = "this step" if self._total_steps else "evaluation"
        grid.add_row(title, ProgressBar(total=self._episodes_per_step, completed=done, width=40),
                     self._progress_text())  # fmt: skip
        return grid

    def _steps(self) -> Table:
        metrics = self._metrics
        shown = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("step", "reward", "loss", "turns", "tokens", "tool errors", "failed", "tok/s", "s"):
            shown.add_column(name, justify="right")
        for point in metrics.steps[-6:]:
            shown.add_row(
                f"w{point.step}" if point.phase == WARMUP else str(point.step),
                number(point.reward),
                number(point.loss),
                number(point.mean_turns, ".1f"),
                number(point.mean_tokens, ".0f"),
                f"{point.tool_failures}/{point.tool_calls}",
                str(point.num_failed),
                number(point.tokens_per_s, ".0f"),
                f"{point.total_s:.1f}",
            )
        return shown

    def _where_time_goes(self) -> Group:
        metrics = self._metrics
        lines = []
        rewards = [point.reward for point in metrics.phase_steps(TRAIN) if point.reward is not None]
        if rewards:
            lines.append(Text(f"reward   {sparkline(rewards)}  {rewards[-1]:.3f}"))
        if metrics.evaluations:
            said = "   ".join(f"{event.name}: {number(event.success)}" for event in metrics.evaluations[-4:])
            lines.append(Text(f"held-out {said}", overflow="ellipsis", no_wrap=True))
        sums = metrics.episodes.get(TRAIN)
        for title, shares in (("steps", metrics.shares()), ("episodes", sums.shares() if sums else {})):
            if shares:
                split = ", ".join(f"{name} {part:.0%}" for name, part in shares.items())
                lines.append(Text(f"time of {title}: {split}"))
        for warning in metrics.warnings[-1:]:
            lines.append(Text(f"warning  {warning.where}: {warning.message}", style="yellow"))
        return Group(*lines)


def sparkline(values: list[float], *, width: int = 48) -> str:
    """Values as a row of bars between the least and the largest; the newest ``width`` of them."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BARS[1 + round((value - low) / span * (len(BARS) - 2))] for value in shown)
