"""What a run came to, as a page of text.

Owns: the tables at the end of a run and of ``tandem runs show``. Refuses: made-up numbers; what was not measured
shows as a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tandem.record.metrics import TRAIN, WARMUP, RunMetrics, fold
from tandem.record.replay import read

DASH = "-"


def summarise_run(folder: Path) -> str:
    """Evaluations, rewards, time and failures of the run in ``folder``."""
    return summarise_metrics(fold(read(folder)))


def summarise_metrics(metrics: RunMetrics) -> str:
    """The same from folded events."""
    parts = [_evaluations(metrics), _training(metrics), _time(metrics), _failures(metrics)]
    return "\n\n".join(part for part in parts if part) or "nothing has happened yet"


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash where there is none."""
    return DASH if value is None else format(value, form)


def table(rows: Sequence[Sequence[str]], *, header: bool = True) -> str:
    """Rows as aligned columns, the first to the left and the others to the right; a rule under the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (cell.ljust(width) if not place else cell.rjust(width)
                          for place, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *others]).rstrip())
    if header:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _evaluations(metrics: RunMetrics) -> str:
    if not metrics.evaluations:
        return ""
    families = sorted({name for event in metrics.evaluations for name in event.by_family})
    rows = [["held-out success", "step", "success", "change", *families, "tasks", "scored", "failed"]]
    before: float | None = None
    for event in metrics.evaluations:
        change = None if before is None or event.success is None else event.success - before
        rows.append(
            [
                event.name,
                str(event.step),
                number(event.success),
                number(change, "+.3f"),
                *(number(event.by_family.get(family)) for family in families),
                str(event.num_tasks),
                str(event.num_tasks - event.num_failed),
                str(event.num_failed),
            ]
        )
        before = event.success if event.success is not None else before
    return table(rows)


def _training(metrics: RunMetrics) -> str:
    lines = []
    for phase, title in ((WARMUP, "supervised warm-up"), (TRAIN, "reinforcement")):
        points = metrics.phase_steps(phase)
        if not points:
            continue
        losses = [point.loss for point in points if point.loss is not None]
        rewards = [point.reward for point in points if point.reward is not None]
        supervised = phase == WARMUP or (not rewards and TRAIN not in metrics.episodes)
        text = f"{title if phase == WARMUP or not supervised else 'training on data'}: {len(points)} steps"
        if supervised and losses:
            text += f", loss {losses[0]:.3f} to {losses[-1]:.3f}"
        if phase == TRAIN and rewards:
            text += f", reward {rewards[0]:.3f} to {rewards[-1]:.3f} (best {max(rewards):.3f})"
        lines.append(text)
    sums = metrics.episodes.get(TRAIN)
    if sums is not None:
        lines.append(
            f"training episodes: {sums.num_scored} scored, {sums.num_failed} failed; "
            f"{number(sums.mean(sums.turns), '.1f')} turns and {number(sums.mean(sums.tokens), '.0f')} tokens each"
        )
    return "\n".join(lines)


def _time(metrics: RunMetrics) -> str:
    lines = []
    if metrics.elapsed_s is not None:
        lines.append(f"wall time: {metrics.elapsed_s:.0f} s, resumed {metrics.resumes} times")
    if shares := metrics.shares():
        lines.append("reinforcement steps: " + _percent(shares))
    sums = metrics.episodes.get(TRAIN)
    if sums is not None and (shares := sums.shares()):
        lines.append("time of training episodes: " + _percent(shares))
    sampled = sum(point.sampled_tokens for point in metrics.phase_steps())
    if sampled and metrics.steps_s:
        lines.append(f"sampled: {sampled} tokens, {sampled / metrics.steps_s:.0f} a second of all step time")
    if metrics.prompt_tokens:
        lines.append(f"prompt tokens from the prefix cache: {metrics.cached_tokens / metrics.prompt_tokens:.0%}")
    return "\n".join(lines)


def _percent(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _failures(metrics: RunMetrics) -> str:
    calls = sum(metrics.tool_calls.values())
    lines = []
    if calls:
        lines.append(f"tool calls: {calls}, failed {sum(metrics.tool_failures.values()) / calls:.0%}")
    named: dict[str, Counter[str]] = {
        "tool failures": metrics.tool_failures,
        "episode failures (attempts)": metrics.episode_failures,
        "reward failures": metrics.reward_failures,
        "sandbox failures": metrics.sandbox_failures,
        "groups dropped": metrics.dropped_groups,
        "tasks rejected": metrics.rejected_tasks,
    }
    for title, counts in named.items():
        if counts:
            lines.append(f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))
    if metrics.retried:
        lines.append(f"attempts retried: {metrics.retried}")
    if metrics.stalls:
        lines.append(f"waits that stalled: {metrics.stalls}")
    lines += [f"warning ({warning.where}): {warning.message}" for warning in metrics.warnings[-5:]]
    return "\n".join(lines)
