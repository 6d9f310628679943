from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from tandem.core.boxes import NetworkPolicy, SandboxSpec, SandboxState
from tandem.core.errors import RecordError, SandboxError
from tandem.sandbox.records import BoxRecord, OnTimeout, SnapshotRecord, StoredLayer
from tandem.sandbox.table import DATABASE, MemoryTable, SqliteTable, StaleRecord, Table

SPEC = SandboxSpec(environment={"A": "1"}, network=NetworkPolicy(allow=("example.org",)))
BOX = BoxRecord(
    id="sbx-1", spec=SPEC, state=SandboxState.RUNNING, metadata={"k": "v"}, deadline=12.5, on_timeout=OnTimeout.PAUSE
)
SNAPSHOT = SnapshotRecord(
    id="snap-1", name="base", spec=SPEC, durable=True, layers=(StoredLayer(kind="folder", blob="ab" * 32),)
)


def next_of(record: BoxRecord, **changes: object) -> BoxRecord:
    return msgspec.structs.replace(record, version=record.version + 1, **changes)


@pytest.fixture(params=["memory", "sqlite"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return MemoryTable() if request.param == "memory" else SqliteTable(tmp_path)


def test_compare_and_set_lets_one_of_two_through(table: Table) -> None:
    table.insert(BOX)
    with pytest.raises(StaleRecord, match="exists already"):
        table.insert(BOX)
    first, second = next_of(BOX, state=SandboxState.PAUSING), next_of(BOX, state=SandboxState.FORKING)
    table.replace(first)
    with pytest.raises(StaleRecord, match="sbx-1 was changed"):
        table.replace(second)
    assert table.boxes() == [first]
    table.remove(BOX.id)
    table.remove(BOX.id)
    with pytest.raises(StaleRecord):
        table.replace(next_of(first))
    assert table.boxes() == []
    table.close()
    table.close()


def test_snapshots_are_put_changed_and_removed(table: Table) -> None:
    table.put_snapshot(SNAPSHOT)
    table.put_snapshot(renamed := msgspec.structs.replace(SNAPSHOT, name="other"))
    assert table.snapshots() == [renamed]
    table.remove_snapshot("snap-1")
    table.remove_snapshot("snap-1")
    assert table.snapshots() == []


def test_records_outlive_the_table(tmp_path: Path) -> None:
    table = SqliteTable(tmp_path)
    table.insert(BOX)
    table.replace(paused := next_of(BOX, state=SandboxState.PAUSED))
    table.put_snapshot(SNAPSHOT)
    with pytest.raises(SandboxError, match="belongs to the running server"):
        SqliteTable(tmp_path)
    table.close()
    again = SqliteTable(tmp_path)
    assert again.boxes() == [paused] and again.snapshots() == [SNAPSHOT]
    again.close()
    assert (tmp_path / DATABASE).stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_time_is_refused(tmp_path: Path) -> None:
    SqliteTable(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(RecordError, match="format 7, this version reads 1"):
        SqliteTable(tmp_path)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    table = SqliteTable(tmp_path)
    table.insert(BOX)
    table.close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("UPDATE boxes SET record = x'c1'")
    again = SqliteTable(tmp_path)
    with pytest.raises(RecordError, match="record of sbx-1 is broken"):
        again.boxes()
    again.close()


def test_a_full_disk_is_said_and_changes_nothing(tmp_path: Path) -> None:
    table = SqliteTable(tmp_path)
    table.insert(BOX)
    pages = table._database.execute("PRAGMA page_count").fetchone()[0]
    table._database.execute(f"PRAGMA max_page_count = {pages}")
    big = msgspec.structs.replace(BOX, id="sbx-2", metadata={"k": "x" * 100_000})
    with pytest.raises(SandboxError, match="full") as caught:
        table.insert(big)
    assert "make room" in caught.value.hint
    assert table.boxes() == [BOX]
    table.close()


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"not a database" * 100)
    for _ in range(2):  # and the lock is given back
        with pytest.raises(SandboxError, match="cannot be opened"):
            SqliteTable(tmp_path)
