"""Runs tasks of our own under Harbor (terminal-bench's harness) with ``-e e2b`` against a server of ours on loopback.

Harbor has an environment of its own (Python 3.12 or later), made beforehand (the script installs nothing):

    python3.12 -m venv H && H/bin/pip install 'harbor[e2b]'
    python benchmarks/harbor.py --peer H/bin/python

Each task is solved by its oracle, which must be worth 1.0, and left alone by the nop agent, which must be worth 0.0.
It prints a table, with the seconds of each trial's phases, and ends with 1 if a reward is another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "harbor_tasks"
WORTH = {"oracle": 1.0, "nop": 0.0}
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Trial:
    """``reward`` None: it ended without one, and ``why`` says so."""

    task: str
    agent: str
    reward: float | None
    seconds: dict[str, float]
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the interpreter that has Harbor")
    parser.add_argument("--rounds", type=int, default=1, help="times that each agent tries each task; the first builds")
    parser.add_argument("--concurrent", type=int, default=2, help="trials at once")
    parser.add_argument("--keep", default="", help="a folder for Harbor's own records of the trials")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="harbor-") as folder:
        jobs = Path(words.keep or folder) / "jobs"
        trials = []
        with served(Path(folder)) as environment:
            for agent in WORTH:
                trials += run(words, agent, jobs, environment)
    show(trials)
    expected = len(WORTH) * words.rounds * len(list(TASKS.iterdir()))
    return int(len(trials) != expected or any(trial.reward != WORTH[trial.agent] for trial in trials))


class served:
    """A server of ours with a state folder of its own; the environment of a client of it."""

    def __init__(self, folder: Path) -> None:
        key = "e2b_" + "6" * 40
        command = [sys.executable, "-m", "tandem.cli.main", "sandbox", "serve", "--port", "0", "--state",
                   str(folder / "state"), "--api-key", key]  # fmt: skip
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._server.stdout is not None
        url = self._server.stdout.readline().split()[3]
        self._client = os.environ | {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": key,
                                     "HARBOR_TELEMETRY": "off"}  # fmt: skip

    def __enter__(self) -> dict[str, str]:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait(60)


def run(words: argparse.Namespace, agent: str, jobs: Path, environment: dict[str, str]) -> list[Trial]:
    harbor = Path(words.peer).absolute().parent / "harbor"
    name = f"{agent}-{os.getpid()}"
    command = [str(harbor), "run", "-p", str(TASKS), "-a", agent, "-e", "e2b", "-o", str(jobs), "--job-name", name,
               "-n", str(words.concurrent), "-k", str(words.rounds), "--quiet", "--yes"]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    found = [trial_of(json.loads(path.read_text()), agent) for path in sorted((jobs / name).glob("*/result.json"))]
    if not found:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return found


def trial_of(told: dict[str, Any], agent: str) -> Trial:
    rewards = (told.get("verifier_result") or {}).get("rewards") or {}
    error = told.get("exception_info") or {}
    phases = ("environment_setup", "agent_execution", "verifier")
    return Trial(
        task=told["task_name"], agent=agent, reward=rewards.get("reward"),
        seconds={phase: seconds(told.get(phase)) for phase in phases},
        why=f"{error.get('exception_type', '')}: {error.get('exception_message', '')}" if error else "",
    )  # fmt: skip


def seconds(phase: dict[str, str] | None) -> float:
    if not phase or not phase.get("finished_at"):
        return float("nan")
    first, last = (datetime.fromisoformat(phase[name]) for name in ("started_at", "finished_at"))
    return (last - first).total_seconds()


def show(trials: list[Trial]) -> None:
    print(f"| {'task':24} | agent  | reward | start s | agent s | verifier s |")
    print("|---|---|---|---|---|---|")
    for trial in trials:
        reward = "none" if trial.reward is None else f"{trial.reward:.1f}"
        times = " | ".join(f"{value:.2f}" for value in trial.seconds.values())
        print(f"| {trial.task:24} | {trial.agent:6} | {reward:6} | {times} | {trial.why[:400]}")


if __name__ == "__main__":
    sys.exit(main())
