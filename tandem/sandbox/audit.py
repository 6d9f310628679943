"""The audit log of a server: every action of its API and every connection that a box tried, in one chain.

Owns: ``audit.jsonl`` (each line holds the digest of the line before, and of its own content) and ``audit.head`` beside
it (how many lines there are and the digest of the last), so that a changed, removed or added line is found, and a lost
end too. Whoever can write both files can make a new history: to rule that out keep a head elsewhere and give it to
``verify``.
Refuses: to go on behind a broken end. Invariants: a line is with the system before the action begins, so that a
killed server loses none; the head is never ahead of the lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.core.errors import RecordError
from tandem.core.wire import digest, storable
from tandem.record.log import GENESIS, Head
from tandem.sandbox.records import now

LINES, HEAD = "audit.jsonl", "audit.head"
HEAD_BYTES = 160  # one write of one size: no reader sees half of it


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """``actor`` is who asked (a key's name and its client's address, ``deadline``, a box for its own connections); ''
    is the program that owns the manager. ``own`` is the digest of the line without it: it names the very record that
    was changed ('' in lines of before there was one)."""

    sequence: int
    time: float
    previous: str
    action: str
    subject: str = ""
    actor: str = ""
    detail: dict[str, str] = {}
    own: str = ""

    def content(self) -> str:
        """What ``own`` must be."""
        return digest(msgspec.json.encode(msgspec.structs.replace(self, own="")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``bad`` is the number of the first bad record, counted from 0; None: all ``num_records`` are what was written.
    A lost end is the record that should come next."""

    num_records: int
    bad: int | None = None
    problem: str = ""
    head: str = ""


class AuditLog:
    """The writer; one a folder (the state folder's lock sees to it)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / LINES
        self._cut_torn_end()
        verdict = verify(folder)
        if verdict.bad is not None:
            raise RecordError(
                f"{self._path}: record {verdict.bad} is bad: {verdict.problem}",
                hint="keep the folder for whoever looks into it, and move it away; a new log begins then",
            )
        self._sequence, self._previous = verdict.num_records, verdict.head
        flags = os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | flags, 0o600)
        self._head = os.open(folder / HEAD, os.O_WRONLY | flags, 0o600)
        self._write_head()

    def append(self, action: str, *, subject: str = "", actor: str = "", **detail: str) -> int:
        """One line, before its action begins; its number.

        Raises:
            RecordError: it cannot be written; then the action must not happen.
        """
        record = AuditLine(
            sequence=self._sequence, time=now(), previous=self._previous, action=action, subject=storable(subject),
            actor=storable(actor), detail={key: storable(value) for key, value in detail.items() if value},
        )
        line = msgspec.json.encode(msgspec.structs.replace(record, own=record.content()))
        data = line + b"\n"
        if self._file < 0:
            raise RecordError(f"{self._path} is closed")
        end = os.fstat(self._file).st_size
        try:
            problem = "" if os.write(self._file, data) == len(data) else "the disk is full"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            raise RecordError(f"{self._path} cannot be written: {problem}", hint="make room on its disk")
        self._previous = digest(line)
        self._sequence += 1
        self._write_head()
        return self._sequence - 1

    def close(self) -> None:
        """Sync and close. Idempotent."""
        if self._file >= 0:
            for descriptor in (self._file, self._head):
                os.fsync(descriptor)
                os.close(descriptor)
            self._file = self._head = -1

    def _write_head(self) -> None:
        head = msgspec.json.encode(Head(self._sequence, self._previous))
        os.pwrite(self._head, head.ljust(HEAD_BYTES - 1) + b"\n", 0)

    def _cut_torn_end(self) -> None:
        """A line that a dying machine wrote in part was never answered for."""
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(self._path, whole)


def read(folder: Path) -> Iterator[AuditLine]:
    """Every record, oldest first; stops at the first that is none."""
    with suppress(FileNotFoundError), (folder / LINES).open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=AuditLine)
            except msgspec.DecodeError:
                return


def verify(folder: Path, *, head: Head | None = None) -> Verdict:
    """Go through the whole chain. ``head`` is one that was kept elsewhere (``num_events`` lines, digest of the
    last); without it the one beside the log is used.

    Raises:
        RecordError: the head beside the log is there, but is none.
    """
    head = head or _read_head(folder)
    previous, count, at_head = GENESIS, 0, GENESIS
    with suppress(FileNotFoundError), (folder / LINES).open("rb") as file:
        for raw in file:
            line = raw.rstrip(b"\n")
            problem = _problem(line, raw, count, previous)
            if problem:
                return Verdict(num_records=count, bad=count, problem=problem, head=previous)
            previous = digest(line)
            count += 1
            if head is not None and count == head.num_events:
                at_head = previous
    if head is None:
        if count:
            problem = "the head is missing: its end may be lost"
            return Verdict(num_records=count, bad=count, problem=problem, head=previous)
        return Verdict(num_records=0)
    if count < head.num_events:
        problem = f"the end is lost: {head.num_events} records were written, {count} are here"
        return Verdict(num_records=count, bad=count, problem=problem, head=previous)
    if at_head != head.digest:
        problem = "it is not the record that the head names"
        return Verdict(num_records=count, bad=max(0, head.num_events - 1), problem=problem, head=previous)
    return Verdict(num_records=count, head=previous)


def _problem(line: bytes, raw: bytes, sequence: int, previous: str) -> str:
    if not raw.endswith(b"\n"):
        return "it is torn"
    try:
        record = msgspec.json.decode(line, type=AuditLine)
    except msgspec.DecodeError as error:
        return f"it is no record: {error}"
    if record.own and record.own != record.content():
        return "it was changed after it was written"
    if record.sequence != sequence:
        return f"it says that it is number {record.sequence}"
    if record.previous != previous:
        return "the record before it is not the one it followed"
    return ""


def _read_head(folder: Path) -> Head | None:
    try:
        return msgspec.json.decode((folder / HEAD).read_bytes(), type=Head)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RecordError(f"{folder / HEAD} is broken: {error}") from error
