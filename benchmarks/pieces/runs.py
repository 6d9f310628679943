"""A whole training run in a temporary folder, and what its log says about time.

Nothing here is a special road: the recipe goes through the checks, the parts and the session of ``tandem train``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tandem.app.build import parts_of
from tandem.app.preflight import Ready, prepare
from tandem.app.session import TrainingSession
from tandem.config.load import load
from tandem.config.tree import Recipe
from tandem.core.events import AnyEvent, Envelope, StepFinished
from tandem.record.log import EventLog
from tandem.record.replay import read

E = TypeVar("E", bound=AnyEvent)
ENVIRONMENTS = Path(__file__).resolve().parents[1] / "environments"


def recipe(*flags: str, files: tuple[Path | str, ...] = ()) -> Recipe:
    """A recipe from files and ``table.key=value`` words."""
    return load(files, [f"--{flag}" for flag in flags])[0]


def no_change(ready: Ready) -> Ready:
    return ready


def endless(ready: Ready) -> Ready:
    """The same model without any token that would end an answer early."""
    ready.model.renderer.stop_token_ids = ()
    spec = dataclasses.replace(ready.model.spec, eos_ids=())
    return dataclasses.replace(ready, model=dataclasses.replace(ready.model, spec=spec))


def train(
    recipe: Recipe, *, change: Callable[[Ready], Ready] = no_change, keep: Callable[[Path], object] = lambda _: None
) -> list[Envelope]:
    """Run a recipe to its end; returns its events. ``change`` may adjust what the checks found, ``keep`` may copy
    from the run's folder before it is removed."""
    ready = change(prepare(recipe))
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        with EventLog(Path(folder)) as log:

            async def whole() -> None:
                async with parts_of(recipe, ready, log) as parts:
                    await TrainingSession(parts, log.folder, log, evaluated=frozenset()).run()

            asyncio.run(whole())
        keep(Path(folder))
        return read(Path(folder))


def of_type(events: list[Envelope], kind: type[E]) -> list[tuple[float, E]]:
    """The events of one kind with their times."""
    return [(each.time, each.event) for each in events if isinstance(each.event, kind)]


def steps(events: list[Envelope]) -> list[tuple[float, StepFinished]]:
    """The reinforcement steps with the times at which they ended."""
    return [(time, event) for time, event in of_type(events, StepFinished) if event.phase == "train"]


def machine() -> str:
    """What the figures depend on: cores, and how busy they were when the benchmark began."""
    return f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f} at the start"
