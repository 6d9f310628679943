"""The event log: one writer, chained, whole after a crash."""

import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from tandem.core.errors import RecordError
from tandem.core.events import RunFinished, WarningRaised
from tandem.record.log import EventLog
from tandem.record.replay import Verdict, read_all, verify


def said(number):
    return WarningRaised(where="test", message=str(number))


def messages(folder):
    return [each.event.message for each in read_all(folder)]


def test_events_come_back_in_order_with_their_causes(tmp_path):
    with EventLog(tmp_path) as log:
        first = log.emit(said(0))
        assert log.emit(said(1), cause=first) == 1
    with EventLog(tmp_path) as log:
        assert log.emit(said(2)) == 2
    events = list(read_all(tmp_path))
    assert [(each.sequence, each.cause) for each in events] == [(0, -1), (1, 0), (2, -1)]
    assert verify(tmp_path).problem == ""


def test_a_second_process_is_refused_by_the_name_of_the_first(tmp_path):
    program = f"""
from pathlib import Path
from tandem.record.log import EventLog
EventLog(Path({str(tmp_path)!r}))
"""
    with EventLog(tmp_path):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert f"is being written by process {os.getpid()}" in done.stderr
    with EventLog(tmp_path):
        pass


def test_a_torn_last_line_is_cut_off_and_said_so(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(said(0))
        log.emit(said(1))
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"sequence":2,"time":1')
    assert messages(tmp_path) == ["0", "1"]
    assert verify(tmp_path) == Verdict(2, "the last line is torn")
    with EventLog(tmp_path) as log:
        log.emit(said(2))
    assert messages(tmp_path) == ["0", "1", "a torn last line of 22 bytes was cut off", "2"]
    assert verify(tmp_path).problem == ""


def test_a_killed_writer_loses_nothing_it_emitted(tmp_path):
    program = f"""
import os, signal
from pathlib import Path
from tandem.core.events import RunFinished, WarningRaised
from tandem.record.log import EventLog
log = EventLog(Path({str(tmp_path)!r}))
for number in range(100):
    log.emit(WarningRaised(where="test", message=str(number)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert messages(tmp_path) == [str(number) for number in range(100)]
    with EventLog(tmp_path) as log:  # the dead writer's lock went with it
        log.emit(said(100))
    assert verify(tmp_path) == Verdict(101)


def test_a_listener_that_fails_is_dropped_and_the_run_goes_on(tmp_path):
    heard = []

    def broken(envelope):
        raise ValueError("no screen")

    with EventLog(tmp_path) as log:
        log.listen(broken)
        log.listen(lambda envelope: heard.append(envelope.event))
        log.emit(said(0))
        log.emit(said(1))
    assert [event.message for event in heard if event.where == "test"] == ["0", "1"]
    assert [event.message for event in heard if event.where != "test"] == ["dropped: ValueError: no screen"]


def test_threads_make_one_chain(tmp_path):
    with EventLog(tmp_path) as log:
        threads = [threading.Thread(target=lambda: [log.emit(said(0)) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert verify(tmp_path).num_events == 200 and verify(tmp_path).problem == ""


def test_a_log_whose_last_line_is_no_event_is_not_continued(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(said(0))
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(RecordError, match="last event is broken"):
        EventLog(tmp_path)


def test_a_log_that_lost_its_end_is_neither_good_nor_continued(tmp_path):
    with EventLog(tmp_path) as log:
        for number in range(4):
            log.emit(said(number))
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify(tmp_path) == Verdict(3, "the end is lost: 4 events were there, 3 are left")
    with pytest.raises(RecordError, match="its end is lost"):
        EventLog(tmp_path)
    with pytest.raises(RecordError, match="its end is lost"):  # the refusal holds no lock
        EventLog(tmp_path)


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(said(0))
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "events.jsonl").stat().st_size + 30, limit[1]))
            with pytest.raises(RecordError, match="no space left at"):
                log.emit(said(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)
        log.emit(said(2))
    assert messages(tmp_path) == ["0", "2"] and verify(tmp_path).problem == ""


def test_nothing_happens_after_the_end(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(RunFinished(step=0, reason="finished"))
    log.close()
    assert verify(tmp_path).ended
    with pytest.raises(RecordError, match="is closed"):
        log.emit(said(0))


def test_a_long_last_line_is_found(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(said(0))
        log.emit(said("x" * 2**20))
    with EventLog(tmp_path) as log:
        assert log.emit(said(2)) == 2
    assert verify(tmp_path).num_events == 3
