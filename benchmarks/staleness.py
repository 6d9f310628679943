"""What overlap buys, and what it costs: ``python benchmarks/staleness.py``.

The ``tiny`` model learns the chores (``recipes/tiny.toml``) with a shell whose latency is log-normal, p99 ten times the
median, so that some episode of every step is late. Staleness 0 waits for it; staleness 2 lets younger groups be made
and trained meanwhile. The median is set in the same run, with staleness 0, such that the episodes spend as many
seconds in the tool as in the model. One supervised warm-up is shared by all runs; then each seed runs both ways, in
turns, for the same number of steps, with the same tasks.

Prints for each seed samples a second (from the first group's start to the last step's end) and the mean reward of the
last steps, and at the end the ratio and the difference in reward with its standard error over the seeds; then where
the time of a step goes, from the runs' own events.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import statistics
import tempfile
from pathlib import Path

from environments.slow_chores import SIGMA
from pieces.runs import ENVIRONMENTS, machine, of_type, recipe, steps, train

from tandem.core.events import EngineReported, Envelope, EpisodeFinished, GroupDropped, GroupStarted, ToolFinished
from tandem.record.summary import table

TINY = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
STALE = 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run's events say. Seconds of a step are means."""

    samples_per_s: float
    reward: float
    step_s: float
    waiting_s: float  # the trainer waits for groups
    training_s: float
    engine_s: float  # the model samples
    model_s: float  # an episode's mean, as the two that follow
    tools_s: float
    calls: float
    staleness: float
    dropped: int

    @classmethod
    def of(cls, events: list[Envelope], *, last: int) -> Outcome:
        ended = steps(events)
        seconds = ended[-1][0] - min(time for time, _ in of_type(events, GroupStarted))
        episodes = [event for _, event in of_type(events, EpisodeFinished) if event.failure is None]
        group_size = of_type(events, GroupStarted)[0][1].size
        delivered = sum(event.num_groups + sum(n for name, n in event.metrics.items() if name.startswith("dropped_"))
                        for _, event in ended)  # fmt: skip
        rewards = [event.mean_reward for _, event in ended[-last:] if event.mean_reward is not None]
        return cls(
            samples_per_s=delivered * group_size / seconds,
            reward=statistics.fmean(rewards),
            step_s=seconds / len(ended),
            waiting_s=statistics.fmean(event.rollout_s for _, event in ended),
            training_s=statistics.fmean(event.train_s for _, event in ended),
            engine_s=statistics.fmean(event.busy_s for _, event in of_type(events, EngineReported)),
            model_s=statistics.fmean(event.model_s for event in episodes),
            tools_s=statistics.fmean(event.tools_s for event in episodes),
            calls=len(of_type(events, ToolFinished)) / len(episodes),
            staleness=statistics.fmean(event.metrics.get("staleness_mean", 0.0) for _, event in ended),
            dropped=sum(event.reason == "stale" for _, event in of_type(events, GroupDropped)),
        )


def flags(options: argparse.Namespace, *, staleness: int, seed: int, median_s: float) -> list[str]:
    """The recipe's changes. Both ways may have as many episodes in flight as staleness 2 can use."""
    in_flight = (STALE + 1) * options.groups * options.group_size
    return [
        f"environment.name={ENVIRONMENTS / 'slow_chores.py'}:environment", "environment.num_eval_tasks=0",
        f"environment.options.median_s={median_s}", f"environment.options.draw_seed={seed}", "rollout.tool_time_s=60",
        f"rollout.groups_per_step={options.groups}", f"rollout.group_size={options.group_size}",
        f"rollout.staleness={staleness}", "algorithm.clip_dual=3", f"rollout.max_concurrent_episodes={in_flight}",
        f"engine.infer.max_num_seqs={in_flight}", "trainer.checkpoint_every=0",
        f"trainer.steps={options.steps}", f"trainer.seed={seed}",
    ]  # fmt: skip


def warmed(options: argparse.Namespace, folder: Path) -> Path:
    """The model after the recipe's supervised steps."""
    changes = [*flags(options, staleness=0, seed=1000, median_s=0.0), "trainer.steps=0"]
    target = folder / "warmed"
    train(recipe(*changes, files=(TINY,)), keep=lambda run: shutil.copytree(run / "model", target))
    return target


def measure(
    options: argparse.Namespace, model: Path, *, staleness: int, seed: int, median_s: float, num_steps: int = 0
) -> Outcome:
    changes = [*flags(options, staleness=staleness, seed=seed, median_s=median_s), f"model.path={model}"]
    changes += ["warmup.steps=0", f"trainer.steps={num_steps or options.steps}"]
    return Outcome.of(train(recipe(*changes, files=(TINY,))), last=options.last)


def calibrated(options: argparse.Namespace, model: Path) -> float:
    """The median latency with which episodes spend as long in the tool as in the model, by one guess and one
    correction: waiting episodes leave the model to others, so their own turns become faster."""
    plain = measure(options, model, staleness=0, seed=2000, median_s=0.0, num_steps=8)
    median_s = plain.model_s / plain.calls / math.exp(SIGMA**2 / 2)
    trial = measure(options, model, staleness=0, seed=2001, median_s=median_s, num_steps=8)
    median_s *= trial.model_s / trial.tools_s
    print(f"the tool's median is {median_s * 1000:.0f} ms, its p99 {median_s * 10_000:.0f} ms", flush=True)
    return median_s


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error (not a number for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--last", type=int, default=6, help="steps whose mean reward is compared")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    options = parser.parse_args()
    print(f"{machine()}; {options.steps} steps of {options.groups} groups of {options.group_size}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        model = warmed(options, Path(folder))
        median_s = calibrated(options, model)
        pairs = []
        for seed in range(options.seeds):
            pair = [measure(options, model, staleness=each, seed=seed, median_s=median_s) for each in (0, STALE)]
            print(
                f"seed {seed}: {pair[0].samples_per_s:.1f} and {pair[1].samples_per_s:.1f} samples/s, reward "
                f"{pair[0].reward:.3f} and {pair[1].reward:.3f}",
                flush=True,
            )
            pairs.append(pair)
    report(pairs)


def report(pairs: list[list[Outcome]]) -> None:
    rows = [["seed", "samples/s, 0", f"samples/s, {STALE}", "ratio", "reward, 0", f"reward, {STALE}", "difference"]]
    ratios = [fast.samples_per_s / slow.samples_per_s for slow, fast in pairs]
    gains = [fast.reward - slow.reward for slow, fast in pairs]
    for seed, ((slow, fast), ratio, gain) in enumerate(zip(pairs, ratios, gains, strict=True)):
        figures = (slow.samples_per_s, fast.samples_per_s, ratio, slow.reward, fast.reward)
        rows.append([str(seed), *(f"{each:.3g}" for each in figures), f"{gain:+.3f}"])
    print(table(rows))
    (ratio, ratio_error), (gain, gain_error) = mean_and_error(ratios), mean_and_error(gains)
    print(f"ratio {ratio:.2f} ± {ratio_error:.2f}; reward {gain:+.3f} ± {gain_error:.3f} (std. error)")
    names = [field.name for field in dataclasses.fields(Outcome)]
    rows = [["means over the seeds", "staleness 0", f"staleness {STALE}"]]
    for name in names:
        rows.append([name, *(f"{statistics.fmean(getattr(pair[way], name) for pair in pairs):.3g}" for way in (0, 1))])
    print(table(rows))


if __name__ == "__main__":
    main()
