"""The table of boxes and snapshots: in memory, or in one SQLite file that outlives the process.

Owns: compare-and-set on the version of a record; durability (a record is on its way to the disk before a method
returns: a killed process loses none; snapshots and paused boxes are synced, so that a dead machine loses none either).
Refuses: a second writer (the folder is locked), a file of another format.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from tandem.core.boxes import SandboxState
from tandem.core.errors import RecordError, SandboxError
from tandem.sandbox.records import BoxRecord, SnapshotRecord

FORMAT = 1
T = TypeVar("T")
DATABASE, LOCK = "sandboxes.db", "writer.lock"
SCHEMA = """
CREATE TABLE IF NOT EXISTS boxes (
  id TEXT PRIMARY KEY, version INTEGER NOT NULL, state TEXT NOT NULL, intent TEXT NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (id TEXT PRIMARY KEY, name TEXT NOT NULL, record BLOB NOT NULL);
"""


class StaleRecord(SandboxError):
    """Someone else changed the record first."""


class Table(Protocol):
    def boxes(self) -> list[BoxRecord]: ...

    def insert(self, record: BoxRecord) -> None: ...

    def replace(self, record: BoxRecord) -> None:
        """Put the record in the place of the one before it (``version - 1``). Raises StaleRecord, SandboxError."""
        ...

    def remove(self, sandbox_id: str) -> None:
        """Idempotent."""
        ...

    def snapshots(self) -> list[SnapshotRecord]: ...

    def put_snapshot(self, record: SnapshotRecord) -> None: ...

    def remove_snapshot(self, snapshot_id: str) -> None:
        """Idempotent."""
        ...

    def close(self) -> None: ...


class MemoryTable:
    """For boxes that end with their process."""

    def __init__(self) -> None:
        self._boxes: dict[str, BoxRecord] = {}
        self._snapshots: dict[str, SnapshotRecord] = {}

    def boxes(self) -> list[BoxRecord]:
        return list(self._boxes.values())

    def insert(self, record: BoxRecord) -> None:
        if record.id in self._boxes:
            raise StaleRecord(f"sandbox {record.id} exists already")
        self._boxes[record.id] = record

    def replace(self, record: BoxRecord) -> None:
        before = self._boxes.get(record.id)
        if before is None or before.version != record.version - 1:
            raise StaleRecord(f"sandbox {record.id} was changed by someone else")
        self._boxes[record.id] = record

    def remove(self, sandbox_id: str) -> None:
        self._boxes.pop(sandbox_id, None)

    def snapshots(self) -> list[SnapshotRecord]:
        return list(self._snapshots.values())

    def put_snapshot(self, record: SnapshotRecord) -> None:
        self._snapshots[record.id] = record

    def remove_snapshot(self, snapshot_id: str) -> None:
        self._snapshots.pop(snapshot_id, None)

    def close(self) -> None:
        """Nothing is kept."""


class SqliteTable:
    """One file and one writer. Its methods take tens of microseconds, synced ones a write to the disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / DATABASE
        self._lock = _take_lock(folder / LOCK)
        try:
            with self._guarded("opened"):
                self._database = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        self._closed = False

    def boxes(self) -> list[BoxRecord]:
        return self._read("SELECT id, record FROM boxes ORDER BY rowid", BoxRecord)

    def insert(self, record: BoxRecord) -> None:
        with self._guarded("written"):
            try:
                self._database.execute("INSERT INTO boxes VALUES (?, ?, ?, ?, ?)", _row(record))
            except sqlite3.IntegrityError as error:
                raise StaleRecord(f"sandbox {record.id} exists already") from error

    def replace(self, record: BoxRecord) -> None:
        with self._guarded("written"), self._synced(record.state is SandboxState.PAUSED):
            _, *values = _row(record)
            changed = self._database.execute(
                "UPDATE boxes SET version = ?, state = ?, intent = ?, record = ? WHERE id = ? AND version = ?",
                (*values, record.id, record.version - 1),
            )
            if changed.rowcount != 1:
                raise StaleRecord(f"sandbox {record.id} was changed by someone else")

    def remove(self, sandbox_id: str) -> None:
        with self._guarded("written"):
            self._database.execute("DELETE FROM boxes WHERE id = ?", (sandbox_id,))

    def snapshots(self) -> list[SnapshotRecord]:
        return self._read("SELECT id, record FROM snapshots ORDER BY rowid", SnapshotRecord)

    def put_snapshot(self, record: SnapshotRecord) -> None:
        with self._guarded("written"), self._synced(True):
            self._database.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET name = excluded.name,"
                " record = excluded.record",
                (record.id, record.name, msgspec.msgpack.encode(record)),
            )

    def remove_snapshot(self, snapshot_id: str) -> None:
        with self._guarded("written"):
            self._database.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._database.close()
            os.close(self._lock)

    def _open(self) -> sqlite3.Connection:
        # Autocommit: each statement is a transaction. The methods belong to one loop, whichever thread that is.
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=5)
        os.chmod(self._path, 0o600)  # environments may hold secrets
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            database.close()
            raise RecordError(f"{self._path} has format {found}, this version reads {FORMAT}")
        database.executescript(SCHEMA)
        database.execute(f"PRAGMA user_version = {FORMAT}")
        return database

    @contextlib.contextmanager
    def _synced(self, wanted: bool) -> Iterator[None]:
        if not wanted:
            yield
            return
        self._database.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self._database.execute("PRAGMA synchronous = NORMAL")

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            hint = "make room on its disk" if "full" in str(error) else ""
            raise SandboxError(f"{self._path} cannot be {what}: {error}", hint=hint) from error

    def _read(self, query: str, kind: type[T]) -> list[T]:
        with self._guarded("read"):
            rows = self._database.execute(query).fetchall()
        records: list[T] = []
        for name, data in rows:
            try:
                records.append(msgspec.msgpack.decode(data, type=kind))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise RecordError(f"{self._path}: the record of {name} is broken: {error}") from error
        return records


def _row(record: BoxRecord) -> tuple[str, int, str, str, bytes]:
    return record.id, record.version, record.state.value, record.intent, msgspec.msgpack.encode(record)


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(descriptor, 32).decode().strip()
        os.close(descriptor)
        raise SandboxError(
            f"{path.parent} belongs to the running server {owner or 'unknown'}",
            hint="one server a state folder: stop that one, or give this one its own folder",
        ) from error
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
