"""How far a loop of the user's own has come, and its checkpoints.

Owns: what a checkpoint of such a loop holds beyond weights, optimizer and random state, the folder of its checkpoints,
and that a folder is gone on with by the recipe that began it. Refuses: the loop. Invariant: what ``restored`` puts back
is all that the next rollout, step or evaluation depends on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tandem.app.run import RECIPE, recipe_of
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError, RecordError
from tandem.core.wire import encode
from tandem.engine.train.checkpoint import CheckpointStore, broken, complete_steps
from tandem.record.replay import read
from tandem.trainer.saving import Saver

CHECKPOINTS = "checkpoints"


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a loop has counted, and what its user keeps beside it: ``own``, plain values by name."""

    step: int = 0
    num_rollouts: int = 0
    num_tasks: int = 0
    num_evaluations: int = 0
    own: dict[str, object] = field(default_factory=dict)

    def packed(self) -> Mapping[str, object]:
        """All of it, for a checkpoint.

        Raises:
            ConfigError: a value of ``own`` cannot be written.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        try:
            encode(values)
        except (TypeError, NotImplementedError, OverflowError) as error:
            raise ConfigError(f"trainer.state cannot be saved: {error}",
                              hint="keep numbers, words, lists and dicts there") from error  # fmt: skip
        return {"progress": values}


async def restored(store: CheckpointStore, progress: Progress) -> None:
    """Put everything back where the newest checkpoint has it; without one nothing changes.

    Raises:
        RecordError: a byte of it is not as saved, or it is of another kind of run.
    """
    latest = store.latest()
    if latest is None:
        return
    extra = await asyncio.to_thread(store.restore, latest)
    saved = cast("Mapping[str, object]", extra.get("progress", {}))
    if set(saved) != set(progress.__slots__):
        raise RecordError(f"the checkpoint of step {latest} is of no loop of the user's own",
                          hint="tandem train --resume goes on with runs of tandem train")  # fmt: skip
    for name, value in saved.items():
        setattr(progress, name, value)


async def checkpointed(saver: Saver, progress: Progress) -> None:
    """Take a checkpoint; no step may be running. It is written while the loop goes on.

    Raises:
        RecordError: the write before this one failed. ConfigError: ``progress.own`` cannot be written.
    """
    await saver.begin(progress.step, progress.packed())


def gone_on_with(folder: Path, recipe: Recipe) -> bool:
    """Whether ``folder`` holds a loop of this recipe to go on with; False: nothing has begun there.

    Raises:
        ConfigError: something else is there, or another recipe. RecordError: its checkpoints are gone.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if not (folder / RECIPE).is_file():
        raise ConfigError(f"{folder} is not empty, and no run", hint="give each run a folder of its own")
    saved, _ = recipe_of(folder)
    if differing := _differing(saved.model_dump(mode="json"), recipe.model_dump(mode="json")):
        raise ConfigError(f"{folder} was begun with other values of {', '.join(differing)}",
                          hint="go on with the same recipe and options, or give a new folder")  # fmt: skip
    kept = folder / CHECKPOINTS
    if not complete_steps(kept) and (lost := broken(kept)):
        name, problem = next(iter(lost.items()))
        raise RecordError(f"no checkpoint in {kept} can be used: {name}: {problem}", hint="put the files back")
    return bool(read(folder))


def _differing(one: object, other: object, place: str = "") -> list[str]:
    """The keys whose values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [
            name for key in keys for name in _differing(one.get(key), other.get(key), f"{place}.{key}".lstrip("."))
        ]
    return [] if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) else [place]
