"""The event log of a run: append-only, hash-chained, one writer.

Owns: ``events.jsonl`` and the lock beside it. Each line is one ``Envelope`` that holds the hash of the line before.
Invariants: one process writes; a line is handed to the system before ``emit`` returns, so that a killed process
loses none; a torn last line is cut off on the next open and said so, never read as if it were whole.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandem.core.errors import RecordError
from tandem.core.events import AnyEvent, Envelope, WarningRaised
from tandem.core.wire import digest
from tandem.record.blobs import BlobStore

EVENTS, LOCK, BLOBS = "events.jsonl", "writer.lock", "blobs"
GENESIS = ""
Listener = Callable[[Envelope], None]


class EventLog:
    """The writer. Use as a context manager; ``listen`` adds in-memory readers, which cannot disturb the run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.blobs = BlobStore(folder / BLOBS)
        self._lock = _take_lock(folder / LOCK)
        self._path = folder / EVENTS
        self._guard = threading.Lock()  # events come from the loop and from executors
        self._encoder = msgspec.json.Encoder()
        self._listeners: list[Listener] = []
        self._sequence, self._previous, torn = _tail(self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the log)
        if torn:
            self.emit(WarningRaised(where="event log", message=f"a torn last line of {torn} bytes was cut off"))

    def listen(self, listener: Listener) -> None:
        """Hear every event from now on; an exception of a listener ends its listening, not the run."""
        self._listeners.append(listener)

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        with self._guard:
            sequence = self._sequence
            envelope = Envelope(
                sequence=sequence,
                time=time.time(),
                process=os.getpid(),
                cause=cause,
                previous=self._previous,
                event=event,
            )
            line = self._encoder.encode(envelope)
            self._file.write(line + b"\n")
            self._previous = digest(line)
            self._sequence += 1
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(envelope)
            except Exception as error:  # a supervisor of readers: facts go on without them
                self._listeners.remove(listener)
                self.emit(WarningRaised(where="event listener", message=f"dropped: {type(error).__name__}: {error}"))
        return sequence

    def put_blob(self, data: bytes) -> str:
        return self.blobs.put(data)

    def close(self) -> None:
        """Sync to the disk and give up the lock."""
        with self._guard:
            os.fsync(self._file.fileno())
            self._file.close()
            os.close(self._lock)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(descriptor, 32).decode().strip()
        os.close(descriptor)
        raise RecordError(
            f"run {path.parent} is being written by process {owner or 'unknown'}",
            hint="wait for it to end, or stop it, before resuming",
        ) from error
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _tail(path: Path) -> tuple[int, str, int]:
    """Next sequence number, hash of the last whole line, and how many torn bytes were cut off behind it."""
    if not path.exists():
        return 0, GENESIS, 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    torn = len(data) - whole
    if torn:
        os.truncate(path, whole)
    lines = data[:whole].splitlines()
    if not lines:
        return 0, GENESIS, torn
    try:
        last = msgspec.json.decode(lines[-1], type=Envelope)
    except msgspec.DecodeError as error:
        hint = "the run cannot be continued; tandem runs show still reads what is whole"
        raise RecordError(f"{path}: last event is broken: {error}", hint=hint) from error
    return last.sequence + 1, digest(lines[-1]), torn
