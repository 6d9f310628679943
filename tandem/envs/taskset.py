"""Where tasks come from: a file of rows, or a function of a seed and a number.

Owns: index-addressable tasks. A position in the data is one integer, so resuming needs nothing else.
Invariant: the same seed and index always give the same task.
"""

from __future__ import annotations

import csv
import difflib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import msgspec

from tandem.core.errors import ConfigError, boundary
from tandem.core.types import Message, Role, Task
from tandem.core.wire import derive_seed, digest

HELD_OUT_SHARE, REDRAWS = 8, 200  # one in eight; a fair draw misses it 200 times in a row once in 10**11
RESERVED = ("id", "prompt", "messages", "files")


@dataclass(frozen=True, slots=True)
class Taskset:
    """Tasks by number. ``get(seed, index)`` makes one; ``size`` is how many different ones there are (None: no
    end). An index past ``size`` begins another pass over them."""

    get: Callable[[int, int], Task]
    size: int | None = None

    def first(self, count: int, *, seed: int) -> list[Task]:
        """The first ``count`` tasks (fewer if there are fewer)."""
        count = count if self.size is None else min(count, self.size)
        return [self.get(seed, index) for index in range(count)]


def generated(function: Callable[[int, int], Task], *, size: int | None = None, held_out: bool = False) -> Taskset:
    """Tasks made by ``function(seed, index)``, which must depend on nothing else.

    Training and held-out tasks never share content: every eighth possible task, by the hash of its messages and
    files, is held out, and ``function`` is asked again with another seed until it gives one of the right kind.
    Held-out tasks do not depend on the run's seed, so that runs compare. With a ``size`` the function enumerates
    its tasks; then it is the function's own matter to keep them apart.
    """

    def get(seed: int, index: int) -> Task:
        drawn = derive_seed("held-out") if held_out else derive_seed("train", seed)
        if size is not None:
            return function(drawn, index % size)
        made = function(drawn, index)
        for attempt in range(1, REDRAWS):
            if _is_held_out(made) == held_out:
                return made
            made = function(derive_seed(drawn, attempt), index)
        if held_out:
            raise ConfigError(
                f"held-out task {index} would be a training task: {made.id} is the same for every seed",
                hint="draw the task from the seed, or give size= and hold tasks out in the function itself",
            )
        return made

    return Taskset(get, size)


def _is_held_out(made: Task) -> bool:
    content = [[message.content for message in made.messages], sorted(made.files.items())]
    return int(digest(msgspec.json.encode(content))[:8], 16) % HELD_OUT_SHARE == 0


def task(prompt: str, *, id: str, system: str = "", files: Mapping[str, str] | None = None, **private: object) -> Task:
    """A task of one user message; other keyword arguments go to ``private``."""
    messages = (Message(role=Role.SYSTEM, content=system),) if system else ()
    return Task(
        id=id,
        messages=(*messages, Message(role=Role.USER, content=prompt)),
        files=dict(files or {}),
        private=dict(private),
    )


def tasks_from(
    path: str | Path, *, columns: Mapping[str, str] | None = None, system: str = "", shuffle: bool = True
) -> Taskset:
    """Tasks from the rows of a ``.jsonl``, ``.json`` (a list) or ``.csv`` file.

    A row has ``prompt`` (text) or ``messages`` (list of role and content), and may have ``id`` and ``files``
    (path to text); all other columns go to the task's ``private`` data. ``columns`` maps these names, or new
    private ones, to the file's own: ``{"prompt": "question"}``. With ``shuffle`` every pass over the file has
    its own order, drawn from the run's seed.

    Raises:
        ConfigError: no such file, not a table, or a row without a needed column (named, with the nearest).
    """
    path = Path(path)
    rows = _read_rows(path)
    made = [_row_task(row, dict(columns or {}), system, f"{path.name} row {n}", n) for n, row in enumerate(rows, 1)]
    if len({each.id for each in made}) < len(made):
        raise ConfigError(f"{path}: two rows have the same id")

    @lru_cache(maxsize=2)
    def order_of(seed: int, epoch: int) -> list[int]:
        order = list(range(len(made)))
        random.Random(derive_seed("order", seed, epoch)).shuffle(order)
        return order

    def get(seed: int, index: int) -> Task:
        epoch, place = divmod(index, len(made))
        return made[order_of(seed, epoch)[place] if shuffle else place]

    return Taskset(get, len(made))


def _read_rows(path: Path) -> list[dict[str, object]]:
    if not path.is_file():
        there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        raise ConfigError(f"no task file at {path.absolute()}", hint=f"nearest there: {near[0]}" if near else "")
    if path.suffix not in (".jsonl", ".json", ".csv"):
        raise ConfigError(f"{path}: unknown kind of task file {path.suffix!r}", hint="use .jsonl, .json or .csv")
    with boundary(ConfigError, f"{path} cannot be read"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            found: object = list(csv.DictReader(text.splitlines(keepends=True)))
        elif path.suffix == ".json":
            found = json.loads(text)
        else:
            found = [_json_line(line, f"{path}:{n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise ConfigError(f"{path}: not a list of rows with named columns, or empty")
    return cast(list[dict[str, object]], found)


def _json_line(line: str, place: str) -> object:
    with boundary(ConfigError, f"{place} is not JSON"):
        return json.loads(line)


def _row_task(row: Mapping[str, object], columns: dict[str, str], system: str, place: str, number: int) -> Task:
    def take(name: str) -> object:
        column = columns.get(name, name)
        if column not in row or row[column] is None:
            near = difflib.get_close_matches(column, row, n=1, cutoff=0.5)
            have = f"it has {', '.join(row)}"
            raise ConfigError(
                f"{place}: no column {column!r}",
                hint=(f"did you mean {near[0]!r}? " if near else "") + f'{have}; map with columns={{"{name}": ...}}',
            )
        return row[column]

    def has(name: str) -> bool:
        return name in columns or row.get(name) is not None

    with boundary(ConfigError, f"{place}: its messages or files have the wrong form"):
        if has("messages"):
            messages = msgspec.convert(take("messages"), list[Message])
        else:
            messages = [Message(role=Role.USER, content=str(take("prompt")))]
        if system:
            messages.insert(0, Message(role=Role.SYSTEM, content=system))
        files = msgspec.convert(take("files"), dict[str, str]) if has("files") else {}
    used = {columns.get(name, name) for name in RESERVED} | set(columns.values())
    private = {name: value for name, value in row.items() if name not in used}
    private |= {name: take(name) for name in columns if name not in RESERVED}
    return Task(
        id=str(take("id")) if has("id") else f"{place.split(' ')[0]}-{number}",
        messages=tuple(messages),
        files=files,
        private=private,
    )
