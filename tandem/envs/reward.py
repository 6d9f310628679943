"""Rewards: functions that say what an episode was worth, their weights, and their typed ends.

Owns: which arguments a reward gets (by parameter name: ``episode``, ``task``, ``box``) and what its answer means.
Every reward runs in a killable process (``reward_pool``), so none can stop the run. Invariant: no number is ever
made up. A reward that raises, hangs, answers None or answers something that is no number fails the episode under
its own name.
"""

from __future__ import annotations

import inspect
import math
import numbers
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import PluginError, RewardError
from tandem.core.protocols import Sandbox
from tandem.core.types import Episode, Failure, FailureKind, Score, Task
from tandem.envs.reward_pool import RewardPool, RewardTimeout

ARGUMENTS = ("episode", "task", "box")


@dataclass(frozen=True, slots=True)
class Reward:
    """A scoring function, its weight in the sum (0: measured only), and its name (the function's).

    The function, sync or async (async if it takes ``box``), takes any of ``episode``, ``task`` and ``box`` and
    returns a number, or None for "no verdict". It stands at the top level of its module: it runs in another
    process, which finds it by name.
    """

    function: Callable[..., object]
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        function = self.function
        object.__setattr__(self, "name", self.name or getattr(function, "__name__", type(function).__name__))
        unknown = [name for name in inspect.signature(function).parameters if name not in ARGUMENTS]
        if unknown:
            raise PluginError(
                f"reward {self.name}: unknown parameter {unknown[0]!r}", hint=f"it may take {', '.join(ARGUMENTS)}"
            )
        if self.needs_box and not inspect.iscoroutinefunction(function):
            raise PluginError(f"reward {self.name} takes the box but is not async", hint="write `async def`")
        if function.__qualname__ != function.__name__ or function.__name__ == "<lambda>":
            raise PluginError(
                f"reward {self.name} is not a module-level function", hint="it runs in another process, by name"
            )

    @property
    def needs_box(self) -> bool:
        return "box" in inspect.signature(self.function).parameters

    @property
    def reference(self) -> str:
        """How another process finds the function: ``module:name``, or ``file.py:name`` for a file."""
        module = sys.modules[self.function.__module__]
        importable = not module.__name__.startswith("tandem_user_") and module.__name__ != "__main__"
        place = module.__name__ if importable else str(Path(module.__file__ or "").resolve())
        return f"{place}:{self.function.__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A score and how long it took."""

    score: Score
    duration_s: float


def number_of(value: object) -> float | None:
    """The float that a reward's answer means; None stays None.

    Raises:
        RewardError: not a number, or not finite.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise RewardError(f"it returned {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise RewardError(f"it returned {float(value)}, not a finite number")
    return float(value)


async def score(
    reward: Reward, *, episode: Episode, task: Task, box: Sandbox | None, pool: RewardPool, time_s: float
) -> Verdict:
    """Score one episode with one reward, within ``time_s``. Never raises for what the function does.

    Raises:
        SandboxError: the box was lost under the reward (an infrastructure failure, no verdict).
    """
    owner = f"reward {reward.name} on episode {episode.id}"
    start = time.perf_counter()
    value: float | None = None
    kind, detail = None, ""
    try:
        value = await pool.call(reward.reference, episode, task, time_s=time_s, box=box if reward.needs_box else None)
        if value is None:
            kind, detail = FailureKind.REWARD_MISSING, f"{owner} gave no verdict (None)"
    except RewardTimeout:
        kind, detail = FailureKind.REWARD_TIMEOUT, f"{owner} took longer than {time_s:g} s"
    except RewardError as error:
        kind, detail = FailureKind.REWARD, f"{owner}: {error.message}"
    made = Score(name=reward.name, value=value, weight=reward.weight, failure=kind, detail=detail)
    return Verdict(score=made, duration_s=time.perf_counter() - start)


def total(scores: Sequence[Score]) -> tuple[float | None, Failure | None]:
    """The weighted sum, or the failure of the first weighted reward without a value."""
    for each in scores:
        if each.weight and each.value is None:
            kind = each.failure or FailureKind.REWARD_MISSING
            return None, Failure(kind=kind, detail=each.detail, retryable=False)
    return sum(each.weight * each.value for each in scores if each.value is not None), None


def check_rewards(rewards: Sequence[Reward], *, has_box: bool) -> None:
    """Raises ``PluginError`` for rewards that could never score."""
    names = [reward.name for reward in rewards]
    if not any(reward.weight for reward in rewards):
        raise PluginError("the environment has no reward with a weight", hint="rewards=[Reward(function)]")
    if len(set(names)) < len(names):
        raise PluginError(f"two rewards share a name: {', '.join(names)}", hint="Reward(function, name=...)")
    for reward in rewards:
        if reward.needs_box and not has_box:
            raise PluginError(f"reward {reward.name} takes the box, but the environment has template=None")


