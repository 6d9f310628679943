"""Rows to token streams: demonstrations, and pairs of a better and a worse answer.

Owns: which columns mean what, the loader hook, and the count of every row that is dropped, by reason.
Refuses: file formats (``rows``), credit. Invariants: nothing is truncated: a row that does not fit is dropped and
counted; both answers of a pair stand after the same prompt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tandem.config.sections.data import DataSection
from tandem.core.errors import ConfigError, boundary
from tandem.core.hub import fetch_repository, is_repository
from tandem.core.registry import Registry
from tandem.core.types import Ids, Mask, Message, Role, mask
from tandem.envs.rows import FORMATS, Row, data_files, read_rows
from tandem.text.render import Renderer

Stream = tuple[Ids, Mask]
COLUMNS = ("messages", "prompt", "completion", "text", "chosen", "rejected")
ROLES = {role.value: role for role in Role}


class _Dropped(Exception):
    """A row that cannot be learned from; the text is its reason."""


@dataclass(slots=True, kw_only=True)
class Loaded:
    """What came of the rows: one stream each, or two (better, worse) of preferences."""

    streams: list[tuple[Stream, ...]] = field(default_factory=list)
    num_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows on this machine: a file, or one split of a folder."""

    path: Path
    split: str = ""

    def files(self) -> list[Path]:
        return data_files(self.path, split=self.split)

    def rows(self) -> Iterator[Row]:
        return read_rows(self.path, split=self.split)


def find_source(section: DataSection, path: str, split: str) -> Source:
    """Where the rows that a recipe names lie; fetched from the hub first where they are there.

    Raises:
        ConfigError: there are none, or the hub does not give them.
    """
    place = Path(path).expanduser()
    if is_repository(path) and not place.parent.is_dir():
        within = [f"{section.subset}/**"] if section.subset else [f"**{suffix}" for suffix in FORMATS]
        place = fetch_repository(path, kind="dataset", files=within)
    source = Source(place / section.subset, split)
    source.files()
    return source


def load_dataset(section: DataSection, source: Source, renderer: Renderer, *, pairs: bool, max_tokens: int) -> Loaded:
    """Read all rows of ``source``.

    Raises:
        ConfigError: a file or the loader hook is broken, or no row is left; the message counts the reasons.
    """
    unknown = [name for name in section.columns if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"data.columns.{unknown[0]}: no column of ours", hint=f"ours are {', '.join(COLUMNS)}")
    reader = _RowReader(section, renderer, pairs=pairs, max_tokens=max_tokens)
    loaded = Loaded()
    for row in source.rows():
        loaded.num_rows += 1
        try:
            loaded.streams.append(reader.streams(row))
        except _Dropped as reason:
            loaded.dropped[str(reason)] += 1
    if not loaded.streams:
        reasons = ", ".join(f"{count} {reason}" for reason, count in loaded.dropped.most_common())
        found = next(source.rows(), {})
        raise ConfigError(
            f"{source.path}: none of {loaded.num_rows} rows can be learned from ({reasons or 'it is empty'})",
            hint=f"its columns are {', '.join(found) or 'none'}; data.columns maps them to ours",
        )
    return loaded


def try_first_row(section: DataSection, source: Source) -> None:
    """Run the loader hook on one row, so that a broken one is known before a model is loaded."""
    for row in itertools.islice(source.rows(), 1):
        _hook(section)(row)


def _hook(section: DataSection) -> Callable[[Row], Row | None]:
    if not section.loader:
        return lambda row: row
    found = cast("Callable[[Row], Row | None]", Registry("environment", {}).resolve(section.loader))

    def checked(row: Row) -> Row | None:
        with boundary(ConfigError, f"data.loader {section.loader} failed on a row with columns {', '.join(row)}"):
            made = found(row)
        if made is not None and not isinstance(made, dict):
            raise ConfigError(f"data.loader {section.loader} gave {type(made).__name__}, not a dict or None")
        return made

    return checked


class _RowReader:
    def __init__(self, section: DataSection, renderer: Renderer, *, pairs: bool, max_tokens: int) -> None:
        self._names = {ours: str(section.columns.get(ours, ours)) for ours in COLUMNS}
        self._hook = _hook(section)
        self._renderer = renderer
        self._pairs = pairs
        self._max_tokens = max_tokens

    def streams(self, row: Row) -> tuple[Stream, ...]:
        changed = self._hook(row)
        if changed is None:
            raise _Dropped("refused by the loader")
        cells = {ours: changed[theirs] for ours, theirs in self._names.items() if changed.get(theirs) is not None}
        if self._pairs:
            made = tuple(self._answer(cells, side) for side in ("chosen", "rejected"))
            if made[0][0] == made[1][0]:
                raise _Dropped("both answers alike")
            return made
        return (self._demonstration(cells),)

    def _demonstration(self, cells: Row) -> Stream:
        if "messages" in cells:
            return self._chat(_messages(cells["messages"], Role.USER))
        if "completion" in cells:
            return self._answer(cells, "completion")
        if "text" in cells:
            tokens = self._renderer.tokenizer.encode_document(str(cells["text"]))
            tokens.append(self._renderer.tokenizer.eos_ids[0])
            return self._fitting(tokens, mask([0]) + mask([1]) * (len(tokens) - 1))
        raise _Dropped("no column to learn from")

    def _answer(self, cells: Row, side: str) -> Stream:
        """The conversation that ends with one answer; only its last message is learned where there is a prompt."""
        if side not in cells:
            raise _Dropped(f"no {side}")
        before = _messages(cells["prompt"], Role.USER) if "prompt" in cells else ()
        after = _messages(cells[side], Role.ASSISTANT)
        if not before and after and after[0].role is Role.ASSISTANT:
            raise _Dropped("no prompt")
        if before and after[: len(before)] == before:
            after = after[len(before) :]
        messages = (*before, *after)
        tokens, flags = self._chat(messages)
        # A comparison is about the last answer alone, and so is a completion.
        start = next(
            span.start for span in self._renderer.spans(messages, ()) if span.message == len(messages) - 1
        )
        return self._fitting(tokens, mask([0]) * start + flags[start:])

    def _chat(self, messages: tuple[Message, ...]) -> Stream:
        if not messages or messages[-1].role is not Role.ASSISTANT:
            raise _Dropped("does not end with an answer")
        if not messages[-1].content.strip():
            raise _Dropped("empty answer")
        return self._fitting(*self._renderer.demonstration(messages, ()))

    def _fitting(self, tokens: Ids, flags: Mask) -> Stream:
        if len(tokens) > self._max_tokens:
            raise _Dropped("too long")
        if not any(flags):
            raise _Dropped("nothing to learn")
        return tokens, flags


def _messages(value: object, role: Role) -> tuple[Message, ...]:
    """A text (said by ``role``), or a list of objects with ``role`` and ``content``."""
    if isinstance(value, str):
        return (Message(role=role, content=value),)
    if not isinstance(value, list):
        raise _Dropped("neither text nor messages")
    return tuple(_each(value))


def _each(values: list[object]) -> Iterator[Message]:
    for value in values:
        said = value if isinstance(value, dict) else {}
        role, content = ROLES.get(str(said.get("role"))), said.get("content")
        if role is None or not isinstance(content, str):
            raise _Dropped("a message without role or text")
        if said.get("tool_calls"):
            raise _Dropped("tool calls")
        yield Message(role=role, content=content)
