"""The curve of one or more runs as a picture: reward, or loss where a run has no rewards.

Owns: what is drawn. Refuses: a run without steps. The plotting library is imported here, at the first use: it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.core.errors import RecordError, boundary
from tandem.record.metrics import TRAIN, RunMetrics, StepPoint, fold
from tandem.record.replay import read

CURVE = "curve.png"
KINDS = (".png", ".svg", ".pdf")


def draw_curve(folder: Path, target: Path | None = None) -> Path:
    """Draw a run's mean reward by step and its held-out success, or, of a run on data, its loss and that of held-out
    rows; returns the file (``curve.png`` in the run folder).

    Raises:
        RecordError: the run has neither finished a step nor an evaluation.
    """
    return draw_curves([folder], target or folder / CURVE)


def draw_curves(folders: Sequence[Path], target: Path) -> Path:
    """Draw several runs into one picture; the suffix of ``target`` says which kind. Losses are drawn only where none
    of the runs has rewards: the two share no scale.

    Raises:
        RecordError: no run has finished a step or an evaluation, or no picture can be written there.
    """
    if target.suffix not in KINDS:
        raise RecordError(f"{target}: unknown kind of picture {target.suffix!r}", hint=f"one of {', '.join(KINDS)}")
    runs = {folder.name: fold(read(folder)) for folder in folders}
    if not any(metrics.steps or metrics.evaluations for metrics in runs.values()):
        raise RecordError(f"nothing to draw: no step is finished in {', '.join(runs)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rewarded = any(metrics.evaluations or _rewarded(metrics) for metrics in runs.values())
    draw = _draw_reward if rewarded else _draw_loss
    for number, (name, metrics) in enumerate(runs.items()):
        draw(axes, name if len(runs) > 1 else "", metrics, f"C{number}")
    axes.set_xlabel("reinforcement step" if rewarded else "step")
    axes.set_ylabel("mean reward, held-out success" if rewarded else "loss")
    top = max(1.02, axes.get_ylim()[1]) if rewarded else axes.get_ylim()[1]
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=top)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # a run of which nothing was scored has nothing to name
        axes.legend(loc="lower right" if rewarded else "upper right", fontsize="small")
    axes.set_title(", ".join(runs) if len(runs) == 1 else f"{len(runs)} runs", fontsize="medium")
    with boundary(RecordError, f"{target} cannot be written"):
        figure.savefig(target, dpi=120)
    return target


def _rewarded(metrics: RunMetrics) -> list[StepPoint]:
    return [point for point in metrics.phase_steps(TRAIN) if point.reward is not None]


def _draw_loss(axes, name: str, metrics: RunMetrics, color: str) -> None:
    label = f"{name}: " if name else ""
    points = metrics.phase_steps(TRAIN)
    axes.plot([point.step for point in points], [point.loss for point in points], color=color, label=f"{label}loss")
    held_out = [point for point in points if "eval_loss" in point.metrics]
    if held_out:
        axes.plot(
            [point.step for point in held_out],
            [point.metrics["eval_loss"] for point in held_out],
            color=color,
            marker="o",
            linestyle="--",
            label=f"{label}loss of held-out rows",
        )


def _draw_reward(axes, name: str, metrics: RunMetrics, color: str) -> None:
    label = f"{name}: " if name else ""
    points = _rewarded(metrics)
    if points:
        axes.plot(
            [point.step for point in points],
            [point.reward for point in points],
            color=color,
            label=f"{label}reward of the step's episodes",
        )
    # The evaluations before reinforcement share step 0; their names tell them apart.
    evaluations = [event for event in metrics.evaluations if event.success is not None]
    if evaluations:
        axes.plot(
            [event.step for event in evaluations],
            [event.success for event in evaluations],
            color=color,
            marker="o",
            linestyle="--",
            label=f"{label}held-out success",
        )
        for event in evaluations:
            axes.annotate(event.name, (event.step, event.success), fontsize="x-small", alpha=0.8,
                          xytext=(4, 4), textcoords="offset points")  # fmt: skip
