"""A training run from its folder to its exit code.

Owns: the run folder (``recipe.json``, ``events.jsonl``, ``checkpoints``, ``model``, ``curve.png``), where a resumed run
goes on, and what the user is told at the end. Refuses: training itself (``session``), signals (``supervise``).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tandem
from tandem.app.build import label_of, parts_of
from tandem.app.ledger import check_memory
from tandem.app.offline import OfflineReady, is_offline, prepare_offline, train_offline
from tandem.app.preflight import Ready, prepare
from tandem.app.session import TrainingSession
from tandem.app.supervise import FAILED, FINISHED, INTERRUPTED, REASONS, program, supervise
from tandem.config.load import from_mapping
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError, RecordError, boundary, writing
from tandem.core.events import (
    CheckpointBegun,
    CheckpointSaved,
    EngineReported,
    Envelope,
    EvaluationFinished,
    GroupStarted,
    RunFinished,
    RunResumed,
    RunStarted,
    StepFinished,
    WarningRaised,
    WeightsPublished,
)
from tandem.engine.train.checkpoint import broken, complete_steps
from tandem.record.curve import draw_curve
from tandem.record.log import EVENTS, EventLog
from tandem.record.metrics import TRAIN, fold
from tandem.record.replay import read
from tandem.record.sinks.console import ConsoleSink
from tandem.record.summary import summarise_run

RECIPE = "recipe.json"
OWN_LOOP = "Trainer"  # the command of a run whose loop is the user's
SHOW_CURSOR = "\x1b[?25h"


def train(
    recipe: Recipe,
    origins: Mapping[str, str],
    *,
    resume: Path | None = None,
    anew: bool = False,
    command: str = "tandem train",
) -> int:
    """Train a recipe in a new run folder, or go on with the run in ``resume``; returns the exit code. ``anew`` lets a
    run that lost its checkpoints begin again.

    Raises:
        RecordError: the run in ``resume`` has come further than any checkpoint that is left, and not ``anew``.
        TandemError: whatever is wrong with recipe, environment, model or machine, before any model is loaded.
    """
    if resume:
        _check_owner(resume)
    if resume and _is_finished(resume):
        print(f"run {resume} is finished")
        return _conclude(resume, FINISHED, "")
    if resume:
        _check_checkpoints(resume, anew=anew)
    ready = prepare_offline(recipe) if is_offline(recipe) else prepare(recipe)
    check_memory(recipe, ready.model)
    folder = resume or _new_folder(recipe)
    with EventLog(folder) as log:

        def last_words() -> None:
            if sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)  # the live display hid it
            _say_how_to_resume(folder)
            log.emit(RunFinished(step=_last_step(log), reason=REASONS[INTERRUPTED], detail="ended at once"))
            log.close()

        with _display(recipe, log, resumed=resume is not None):
            begun = bool(read(folder))  # not so when it was killed before its first event
            evaluated = resume_log(log) if begun else begin_log(log, recipe, origins, command)
            code, detail = supervise(
                lambda: _train(recipe, ready, log, evaluated), last_words, stopping="ending episodes and boxes"
            )
            with contextlib.suppress(RecordError):  # a log that cannot be written is what ``detail`` tells then
                log.emit(RunFinished(step=_last_step(log), reason=REASONS[code], detail=detail))
    return _conclude(folder, code, detail)


def recipe_of(folder: Path) -> tuple[Recipe, dict[str, str]]:
    """The resolved recipe of a run, and where each of its values came from.

    Raises:
        RecordError: there is no run in ``folder``, or its recipe cannot be read by this version.
    """
    path = folder / RECIPE
    if not path.is_file():
        raise RecordError(f"no recipe in {folder}: no run, or one that was killed before it began",
                          hint="tandem runs list names the runs of a folder")  # fmt: skip
    hint = f"put the file back, or the recipe's own from the run's blobs (config_blob of the first line of {EVENTS})"
    with boundary(RecordError, f"{path} is broken", hint=hint):
        saved = json.loads(path.read_text())
        tree, origins = saved["recipe"], dict(saved["origins"])
    try:
        return from_mapping(tree), origins
    except ConfigError as error:
        hint = f"it was written by another version of tandem; {error.hint}".rstrip("; ")
        raise RecordError(f"{path}: {error.message}", hint=hint) from error


async def _train(recipe: Recipe, ready: Ready | OfflineReady, log: EventLog, evaluated: frozenset[str]) -> None:
    if isinstance(ready, OfflineReady):
        await train_offline(recipe, ready, log.folder, log)
        return
    async with parts_of(recipe, ready, log) as parts:
        await TrainingSession(parts, log.folder, log, evaluated=evaluated).run()


# ---- the folder
def _new_folder(recipe: Recipe) -> Path:
    label = f"{label_of(recipe)}-{datetime.datetime.now():%Y%m%d-%H%M%S}-s{recipe.trainer.seed}"
    folder = Path(recipe.record.folder) / (recipe.record.name or label)
    with writing(folder, ConfigError, hint="choose another record.folder (--record.folder)"):
        if folder.is_dir() and not any(folder.iterdir()):
            return folder
        taken = folder.exists() or folder.is_symlink()
        if not taken:
            folder.mkdir(parents=True)
    if taken:
        resume = f"go on with it: {program()} train --resume {shlex.quote(str(folder))}; or "
        is_run = (folder / RECIPE).is_file()
        raise ConfigError(f"run folder {folder} exists", hint=f"{resume if is_run else ''}choose another record.name")
    return folder


def begin_log(log: EventLog, recipe: Recipe, origins: Mapping[str, str], command: str) -> frozenset[str]:
    """Write the recipe and the first event of a new run; returns the evaluations that are done: none."""
    saved = json.dumps({"recipe": recipe.model_dump(mode="json"), "origins": dict(origins)}, indent=1)
    path = log.folder / RECIPE
    scratch = path.with_suffix(".new")
    with writing(path, RecordError, hint="make room, then start again"):
        scratch.write_text(saved)
        os.replace(scratch, path)
    log.emit(
        RunStarted(
            run_id=log.folder.name,
            version=tandem.__version__,
            command=command,
            config_blob=log.put_blob(saved.encode()),
            deterministic=recipe.trainer.deterministic,
        )
    )
    return frozenset()


# ---- going on
def _is_finished(folder: Path) -> bool:
    metrics = fold(read(folder))
    return metrics.finished is not None and metrics.finished.reason == REASONS[FINISHED]


def _check_owner(folder: Path) -> None:
    """A loop of the user's own is gone on with by its program: nobody else knows what comes next."""
    begun = next((each.event for each in read(folder) if isinstance(each.event, RunStarted)), None)
    if begun is not None and begun.command == OWN_LOOP:
        raise ConfigError(f"run {folder} is an own loop's", hint="start its program again: Trainer(..., resume=True)")


def _check_checkpoints(folder: Path, *, anew: bool) -> None:
    """Training must not begin again because its checkpoints are gone: the user decides that."""
    kept, events = folder / "checkpoints", read(folder)
    if steps := complete_steps(kept):
        if anew:
            hint = f"leave --anew out to go on from it, or move {kept} away to begin anew"
            raise ConfigError(f"run {folder} has a good checkpoint of step {steps[-1]}", hint=hint)
        return
    saved = [each.event.step for each in events if isinstance(each.event, CheckpointSaved)]
    if saved and not anew:
        why = "".join(f"\n  {name}: {problem}" for name, problem in broken(kept).items()) or "\n  there are none"
        again = f"{program()} train --resume {shlex.quote(str(folder))} --anew"
        raise RecordError(
            f"run {folder} was saved at step {saved[-1]}, but no checkpoint in {kept} can be used:{why}",
            hint=f"put the files back; or begin anew from step 0: {again}",
        )


def resume_log(log: EventLog) -> frozenset[str]:
    """Say in the log where the run goes on, and what it cannot use; returns the names of the evaluations that stay."""
    steps = complete_steps(log.folder / "checkpoints")
    step = steps[-1] if steps else 0
    events = read(log.folder)
    keep, path = _checkpoint(events, step) if steps else (0, "")
    log.emit(RunResumed(step=step, keep_sequence=keep, checkpoint=path))
    for name, problem in broken(log.folder / "checkpoints").items():
        log.emit(WarningRaised(where="checkpoint", message=f"{name} is skipped: {problem}"))
    kept = [each.event for each in events if each.sequence <= keep]
    return frozenset(event.name for event in kept if isinstance(event, EvaluationFinished))


def _checkpoint(events: list[Envelope], step: int) -> tuple[int, str]:
    """The last event that the checkpoint of ``step`` holds, and its path; empty where the run was killed between the
    rename and its event."""
    saved = [each for each in events if isinstance(each.event, CheckpointSaved) and each.event.step == step]
    path = saved[-1].event.path if saved and isinstance(saved[-1].event, CheckpointSaved) else ""
    for each in reversed(events):
        if isinstance(each.event, CheckpointBegun) and each.event.step == step:
            return each.sequence, path
    if saved:
        return saved[-1].sequence, path
    # A log whose end was lost.
    if step == 0:  # all that was before the first training group counts
        groups = (each for each in events if isinstance(each.event, GroupStarted) and each.event.purpose == TRAIN)
        first = next(groups, None)
        return (first.sequence if first else events[-1].sequence + 1) - 1, ""
    # What a step says last comes just before its checkpoint is written.
    last = [
        each.sequence
        for each in events
        if isinstance(each.event, (WeightsPublished, EngineReported)) and each.event.step == step
    ]
    return (last[-1] if last else events[-1].sequence), ""


def _last_step(log: EventLog) -> int:
    steps = [each.event.step for each in read(log.folder) if isinstance(each.event, StepFinished)]
    return steps[-1] if steps else 0


# ---- what the user sees
@contextlib.contextmanager
def _display(recipe: Recipe, log: EventLog, *, resumed: bool) -> Iterator[None]:
    if "console" not in recipe.record.sinks:
        yield
        return
    with ConsoleSink(
        log.folder.name,
        total_steps=recipe.trainer.steps,
        episodes_per_step=recipe.rollout.groups_per_step * recipe.rollout.group_size,
        warmup_steps=recipe.warmup.steps,
        resumed=(lambda: fold(read(log.folder))) if resumed else None,
    ) as sink:
        log.listen(sink)
        yield


def _conclude(folder: Path, code: int, detail: str) -> int:
    if code != INTERRUPTED:  # who stops a run waits for its end, not for a picture
        with contextlib.suppress(RecordError):  # nothing to draw yet
            draw_curve(folder)
    print(f"\n{summarise_run(folder)}\n")
    if code == FINISHED:
        shown = shlex.quote(str(folder))
        print(f"model:    {folder / 'model'}\ncurve:    {folder / 'curve.png'}\nserve it: {program()} serve {shown}")
        return code
    if code == FAILED:
        print(f"error: {detail}", file=sys.stderr)
    _say_how_to_resume(folder)
    return code


def _say_how_to_resume(folder: Path) -> None:
    print(f"go on:    {program()} train --resume {shlex.quote(str(folder))}", file=sys.stderr, flush=True)
