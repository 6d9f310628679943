"""One evaluation of one model, outside a training run, by the same road.

Owns: its folder of events and what is printed. Refuses: training.
"""

from __future__ import annotations

import datetime
import itertools
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import tandem
from tandem.app.build import label_of, parts_of
from tandem.app.preflight import Ready, prepare
from tandem.app.supervise import FAILED, FINISHED, REASONS, program, supervise
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError, RecordError, writing
from tandem.core.events import RunFinished, RunStarted
from tandem.record.log import EventLog
from tandem.record.sinks.console import ConsoleSink
from tandem.record.summary import summarise_run

FOLDER = "evaluations"  # in the folder of runs; they are no runs


def evaluate(recipe: Recipe, *, model_path: Path | None = None) -> int:
    """Evaluate ``model_path`` (default: the recipe's model) on the held-out tasks; returns the exit code.

    Raises:
        TandemError: whatever is wrong, before any model is loaded.
    """
    count = recipe.environment.num_eval_tasks
    if not count:
        raise ConfigError("environment.num_eval_tasks is 0: nothing to evaluate", hint="set it to 64, say")
    ready = prepare(recipe, model_path=model_path)
    if ready.environment.eval_tasks is None:
        raise ConfigError(f"environment {ready.environment.name!r} has no evaluation tasks",
                          hint="give the environment eval_tasks=...")  # fmt: skip
    folder = _new_folder(recipe)
    with EventLog(folder) as log, ConsoleSink(f"evaluation of {ready.model.path}", total_steps=0,
                                              episodes_per_step=count) as sink:  # fmt: skip
        log.listen(sink)
        log.emit(RunStarted(run_id=folder.name, version=tandem.__version__, command=f"evaluate {ready.model.path}",
                            config_blob=log.put_blob(recipe.model_dump_json().encode()),
                            deterministic=recipe.trainer.deterministic))  # fmt: skip
        code, detail = supervise(
            lambda: _evaluate(recipe, ready, log), lambda: None, stopping="ending episodes and boxes"
        )
        with suppress(RecordError):  # a log that cannot be written is what ``detail`` tells then
            log.emit(RunFinished(step=0, reason=REASONS[code], detail=detail))
    if code == FAILED:
        print(f"error: {detail}", file=sys.stderr)
    if code == FINISHED:
        shown = shlex.quote(str(folder))
        print(f"\n{summarise_run(folder)}\n\nepisodes: {program()} runs show {shown} --episodes")
    return code


def _new_folder(recipe: Recipe) -> Path:
    label = f"{label_of(recipe)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    parent = Path(recipe.record.folder) / FOLDER
    with writing(parent, ConfigError, hint="choose another record.folder (--record.folder)"):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):  # several in one second are several
            folder = parent / (label if number == 1 else f"{label}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise AssertionError


async def _evaluate(recipe: Recipe, ready: Ready, log: EventLog) -> None:
    async with parts_of(recipe, ready, log) as parts:
        outcome = await parts.evaluate("held-out", 0)
        assert outcome is not None, "there are tasks: that was checked"
        log.emit(outcome)
