"""Rewards: functions that say what an episode was worth, their weights, and their typed ends.

Owns: which arguments a reward gets (by parameter name: ``episode``, ``task``, ``box``), where it runs, and what
its answer means. A reward that takes the box runs here, async, under a deadline; every other one runs in a
killable process (``reward_pool``). Invariant: no number is ever made up. A reward that raises, hangs, answers
None or answers something that is no number fails the episode under its own name.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import PluginError, RewardError, SandboxError
from tandem.core.protocols import Sandbox
from tandem.core.types import Episode, Failure, FailureKind, Score, Task
from tandem.envs.foreign import describe
from tandem.envs.reward_pool import RewardPool, RewardTimeout

ARGUMENTS = ("episode", "task", "box")


@dataclass(frozen=True, slots=True)
class Reward:
    """A scoring function, its weight in the sum (0: measured only), and its name (the function's).

    The function, sync or async, takes any of ``episode``, ``task`` and ``box`` and returns a number, or None for
    "no verdict". One that takes ``box`` must be async; any other must be a module-level function, because it
    runs in another process.
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
        if not self.needs_box and (function.__qualname__ != function.__name__ or function.__name__ == "<lambda>"):
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


def number_of(value: object, owner: str) -> float | None:
    """The float that a reward's answer means; None stays None.

    Raises:
        RewardError: not a number, or not finite; the message begins with ``owner``.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{owner} returned {type(value).__name__}, not a number")
    if not math.isfinite(value):
        raise RewardError(f"{owner} returned {float(value)}, not a finite number")
    return float(value)


async def score(
    reward: Reward, *, episode: Episode, task: Task, box: Sandbox | None, pool: RewardPool, time_s: float
) -> Verdict:
    """Score one episode with one reward, within ``time_s``. Never raises for what the function does.

    Raises:
        SandboxError: the box was lost under a reward that uses it (an infrastructure failure, no verdict).
    """
    owner = f"reward {reward.name} on episode {episode.id}"
    start = time.perf_counter()
    value, kind, detail = None, None, ""
    try:
        if reward.needs_box:
            answer = await _score_in_box(reward, episode, task, box, time_s)
        else:
            answer = await pool.call(reward.reference, episode, task, time_s=time_s)
        value = number_of(answer, owner)
        if value is None:
            kind, detail = FailureKind.REWARD_MISSING, f"{owner} gave no verdict (None)"
    except RewardTimeout:
        kind, detail = FailureKind.REWARD_TIMEOUT, f"{owner} took longer than {time_s:g} s"
    except RewardError as error:
        text = error.message
        kind, detail = FailureKind.REWARD, text if text.startswith(owner) else f"{owner}: {text}"
    made = Score(name=reward.name, value=value, weight=reward.weight, failure=kind, detail=detail)
    return Verdict(score=made, duration_s=time.perf_counter() - start)


async def _score_in_box(reward: Reward, episode: Episode, task: Task, box: Sandbox | None, time_s: float) -> object:
    if box is None:
        raise RewardError("it wants a box, but the environment has template=None")
    available = {"episode": episode, "task": task, "box": box}
    arguments = {name: available[name] for name in inspect.signature(reward.function).parameters}
    try:
        async with asyncio.timeout(time_s) as deadline:
            return await reward.function(**arguments)
    except (SandboxError, RewardError):
        raise
    except TimeoutError as error:
        if deadline.expired():
            raise RewardTimeout(f"no answer within {time_s:g} s") from error
        raise RewardError(describe(error)) from error
    except Exception as error:  # the boundary to the user's code, which must name its line
        raise RewardError(describe(error)) from error


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


