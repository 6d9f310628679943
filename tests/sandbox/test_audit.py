from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tandem.core.errors import RecordError
from tandem.record.log import Head
from tandem.sandbox.audit import HEAD, LINES, AuditLine, AuditLog, read, verify


def written(folder: Path, count: int = 5) -> list[bytes]:
    log = AuditLog(folder)
    for number in range(count):
        log.append("create", subject=f"sbx-{number}", actor="key", template="host", empty="")
    log.close()
    log.close()
    return (folder / LINES).read_bytes().splitlines(keepends=True)


def test_a_log_that_nobody_touched_is_whole_and_goes_on(tmp_path: Path) -> None:
    assert verify(tmp_path).num_records == 0
    written(tmp_path)
    written(tmp_path, 2)
    verdict = verify(tmp_path)
    assert (verdict.num_records, verdict.bad) == (7, None)
    lines = list(read(tmp_path))
    assert [line.sequence for line in lines] == list(range(7))
    assert lines[6].subject == "sbx-1" and lines[0].detail == {"template": "host"}


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("change", ["edit", "forge", "remove", "twice", "junk"])
def test_the_first_bad_record_is_named(tmp_path: Path, number: int, change: str) -> None:
    lines = written(tmp_path)
    match change:
        case "edit":
            lines[number] = lines[number].replace(b"create", b"resume")
        case "forge":
            record = msgspec.json.decode(lines[number], type=AuditLine)
            record = msgspec.structs.replace(record, action="resume")
            lines[number] = msgspec.json.encode(msgspec.structs.replace(record, own=record.content())) + b"\n"
        case "remove":
            del lines[number]
        case "twice":
            lines.insert(number, lines[number])
        case _:
            lines[number] = b"{}\n"
    (tmp_path / LINES).write_bytes(b"".join(lines))
    verdict = verify(tmp_path)
    # A forged record is whole in itself: the next one betrays it, which does not follow it, or the head the last one.
    wanted = {"forge": min(number + 1, 4), "twice": number + 1}.get(change, number)
    assert verdict.bad == wanted and verdict.problem
    with pytest.raises(RecordError, match=f"record {wanted} is bad"):
        AuditLog(tmp_path)


@pytest.mark.parametrize("left", range(5))
def test_a_lost_end_is_found(tmp_path: Path, left: int) -> None:
    lines = written(tmp_path)
    (tmp_path / LINES).write_bytes(b"".join(lines[:left]))
    verdict = verify(tmp_path)
    assert verdict.bad == left and "5 records were written" in verdict.problem


def test_a_history_written_anew_is_found_by_a_head_kept_elsewhere(tmp_path: Path) -> None:
    written(tmp_path / "a")
    head = msgspec.json.decode((tmp_path / "a" / HEAD).read_bytes(), type=Head)
    log = AuditLog(tmp_path / "b")
    for _ in range(6):
        log.append("other")
    log.close()
    assert verify(tmp_path / "b").bad is None
    assert verify(tmp_path / "b", head=head).bad == 4
    assert verify(tmp_path / "a", head=head).bad is None


def test_a_head_that_is_gone_is_said(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / HEAD).unlink()
    assert "head is missing" in verify(tmp_path).problem
    (tmp_path / HEAD).write_text("{")
    with pytest.raises(RecordError, match="is broken"):
        verify(tmp_path)


def test_a_killed_writer_is_no_lost_end(tmp_path: Path) -> None:
    """The line is there, its head not yet; or half a line is."""
    lines = written(tmp_path, 5)
    written(tmp_path / "short", 4)
    (tmp_path / "short" / LINES).write_bytes(b"".join(lines))
    head = (tmp_path / "short" / HEAD).read_bytes()
    (tmp_path / HEAD).write_bytes(msgspec.json.encode(Head(4, msgspec.json.decode(lines[4])["previous"])))
    assert len(head) == 160 and verify(tmp_path).bad is None
    (tmp_path / LINES).write_bytes(b"".join(lines) + b'{"half')
    assert verify(tmp_path).bad == 5
    written(tmp_path, 1)
    assert verify(tmp_path).num_records == 6


def test_a_full_disk_keeps_the_chain_whole(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    log = AuditLog(tmp_path)
    log.append("create")
    kept, log._file = log._file, os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(RecordError, match="cannot be written: No space left"):
        log.append("kill")
    os.close(log._file)
    log._file = kept
    log.append("pause")
    log.close()
    assert [line.action for line in read(tmp_path)] == ["create", "pause"] and verify(tmp_path).bad is None
    with pytest.raises(RecordError, match="is closed"):
        log.append("late")
