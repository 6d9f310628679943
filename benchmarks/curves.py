"""Does every algorithm learn: ``python benchmarks/curves.py``.

The ``tiny`` model sorts numbers (the generator of reasoning-gym, ``environments/sorting.py``). Supervised steps on a
teacher who often errs are shared by all runs; then each algorithm reinforces from that same model, for each seed, with
its own defaults and one learning rate for all. On-policy distillation has a teacher instead of a reward: the model
that most steps of ``grpo`` made.

Prints the held-out reward before and after, the mean gain over the seeds with its standard error, and how many seeds
gained; exits with 1 when an algorithm's gain is not at least two standard errors above 0. ``--log`` keeps each run's
figures as a line of JSON and goes on where a killed benchmark stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from pieces.runs import ENVIRONMENTS, machine, of_type, recipe, steps, train

from tandem.algorithms.spec import AlgorithmSpec, algorithms
from tandem.core.events import EvaluationFinished
from tandem.record.summary import table

TINY = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo", "reinforce_pp", "reinforce_pp_baseline", "ppo", "distil")
LEARNT = 2.0  # standard errors by which the mean gain must be above 0


def flags(options: argparse.Namespace, *, seed: int) -> list[str]:
    return [
        f"environment.name={ENVIRONMENTS / 'sorting.py'}:environment",
        f"environment.num_eval_tasks={options.held_out}", "model.max_context_tokens=128", "rollout.max_turns=1",
        "rollout.max_turn_tokens=32", "trainer.checkpoint_every=0", f"trainer.seed={seed}",
        f"optimizer.learning_rate={options.learning_rate}", f"warmup.steps={options.warmup}",
    ]  # fmt: skip


def made(options: argparse.Namespace, target: Path, *changes: str) -> None:
    """Run the recipe with these changes and keep its model as ``target``; a model that is there is taken."""
    if not target.exists():
        chosen = recipe(*flags(options, seed=1000), *changes, files=(TINY,))
        train(chosen, keep=lambda run: shutil.copytree(run / "model", target))


def own(method: str, options: argparse.Namespace, teacher: Path) -> list[str]:
    """What a method cannot do without, and its paper's KL, which the recipe sets to 0."""
    record = algorithms().resolve(method)
    assert isinstance(record, AlgorithmSpec)
    match method:
        case "ppo":
            needed = [f"critic.learning_rate={options.learning_rate}"]
        case "distil":
            needed = [f"algorithm.teacher={teacher}"]
        case _:
            needed = []
    return [f"algorithm.kl_weight={record.kl_weight}", *needed]


def measure(options: argparse.Namespace, method: str, *, seed: int, model: Path, teacher: Path) -> dict[str, object]:
    """One run: held-out reward before and after, and the reward of the samples over the steps."""
    changes = [f"model.path={model}", f"algorithm.name={method}", f"trainer.steps={options.steps}", "warmup.steps=0"]
    events = train(recipe(*flags(options, seed=seed), *changes, *own(method, options, teacher), files=(TINY,)))
    held_out = [event.mean_reward for _, event in of_type(events, EvaluationFinished)]
    if None in held_out or len(held_out) < 2:
        raise SystemExit(f"{method}, seed {seed}: an evaluation without a reward")
    rewards = [event.mean_reward for _, event in steps(events)]
    return {"method": method, "seed": seed, "before": held_out[0], "after": held_out[-1], "rewards": rewards}


def report(runs: list[dict[str, object]]) -> bool:
    """The table; True when every method learnt."""
    rows, good = [["algorithm", "seeds", "before", "after", "gain", "std. error", "seeds that gained"]], True
    for method in METHODS:
        pairs = [(float(str(run["before"])), float(str(run["after"]))) for run in runs if run["method"] == method]
        if not pairs:
            continue
        gains = [after - before for before, after in pairs]
        mean = statistics.fmean(gains)
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        good &= mean > LEARNT * error
        figures = (statistics.fmean(before for before, _ in pairs), statistics.fmean(after for _, after in pairs))
        rows.append([method, str(len(pairs)), *(f"{each:.3f}" for each in figures), f"{mean:+.3f}", f"{error:.3f}",
                     f"{sum(gain > 0 for gain in gains)} of {len(gains)}"])  # fmt: skip
    print(table(rows))
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--held-out", type=int, default=256, help="tasks of an evaluation")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--log", type=Path, help="a file of finished runs, with the models beside it")
    options = parser.parse_args()
    print(f"{machine()}; {options.steps} steps of 8 groups of 8, learning rate {options.learning_rate}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as scratch:
        log = options.log or Path(scratch) / "runs.jsonl"
        model, teacher = log.parent / "warmed", log.parent / "teacher"
        made(options, model, "trainer.steps=0")
        if "distil" in options.methods:
            made(options, teacher, f"model.path={model}", "warmup.steps=0", f"trainer.steps={3 * options.steps}")
        runs = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        known = {(run["method"], run["seed"]) for run in runs}
        for seed in range(options.seeds):
            for method in options.methods:
                if (method, seed) in known:
                    continue
                runs.append(measure(options, method, seed=seed, model=model, teacher=teacher))
                with log.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
                print(f"seed {seed}, {method}: {runs[-1]['before']:.3f} to {runs[-1]['after']:.3f}", flush=True)
    sys.exit(not report([run for run in runs if run["method"] in options.methods]))


if __name__ == "__main__":
    main()
