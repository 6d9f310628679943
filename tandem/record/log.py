"""The event log of a run: append-only, hash-chained, one writer.

Owns: ``events.jsonl``, the lock and the head beside it. Each line is one ``Envelope`` that holds the hash of the line
before; the head names the last line that was synced to the disk, so that a log which lost its end is known as such.
Invariants: one process writes; a line is handed to the system before ``emit`` returns, so that a killed process
loses none; a torn last line is cut off on the next open and said so, never read as if it were whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.core.errors import RecordError, writing
from tandem.core.events import AnyEvent, CheckpointBegun, CheckpointSaved, Envelope, RunFinished, WarningRaised
from tandem.core.wire import digest
from tandem.record.blobs import BlobStore

EVENTS, HEAD, LOCK, BLOBS = "events.jsonl", "events.head", "writer.lock", "blobs"
GENESIS = ""
HINT = "make room, then resume the run"
TAIL_BYTES = 2**18
Listener = Callable[[Envelope], None]


class Head(msgspec.Struct, frozen=True):
    """The last synced line: how many there were with it, and its hash."""

    num_events: int
    digest: str


def read_head(folder: Path) -> Head | None:
    """The head of a run's log; None for one that was never synced."""
    try:
        return msgspec.json.decode((folder / HEAD).read_bytes(), type=Head)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise RecordError(f"{folder / HEAD} is broken: {error}") from error


class EventLog:
    """The writer. Use as a context manager; ``listen`` adds in-memory readers, which cannot disturb the run."""

    def __init__(self, folder: Path) -> None:
        with writing(folder, RecordError, hint="make room, or make it writable"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(folder / LOCK)
        self.folder = folder
        self.blobs = BlobStore(folder / BLOBS)
        self._path = folder / EVENTS
        self._guard = threading.Lock()  # events come from the loop and from executors
        self._encoder = msgspec.json.Encoder()
        self._listeners: list[Listener] = []
        self._failed = False
        try:
            self._sequence, self._previous, torn = _tail(self._path)
            self._check_head()
        except BaseException:
            os.close(self._lock)
            raise
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
            self._write(line + b"\n")
            self._previous = digest(line)
            self._sequence += 1
            if isinstance(event, (CheckpointBegun, CheckpointSaved, RunFinished)):
                self._sync()
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(envelope)
            except Exception as error:  # a supervisor of readers: facts go on without them
                with suppress(ValueError):
                    self._listeners.remove(listener)
                self.emit(WarningRaised(where="event listener", message=f"dropped: {type(error).__name__}: {error}"))
        return sequence

    def _write(self, data: bytes) -> None:
        """Append whole or not at all.

        Raises:
            RecordError: the disk is full or gone. A run without its memory must not go on.
        """
        if self._file.closed:
            raise RecordError(f"{self._path} is closed: nothing can happen in this run any more")
        end = os.fstat(self._file.fileno()).st_size
        try:
            with writing(self._path, RecordError, hint=HINT):
                if self._file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except RecordError:
            self._failed = True
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise

    def _sync(self) -> None:
        failed, self._failed = self._failed, True
        with writing(self._path, RecordError, hint=HINT):
            os.fsync(self._file.fileno())
            scratch = self.folder / f".{HEAD}.new"
            scratch.write_bytes(msgspec.json.encode(Head(self._sequence, self._previous)))
            os.replace(scratch, self.folder / HEAD)
        self._failed = failed

    def _check_head(self) -> None:
        head = read_head(self.folder)
        if head is not None and head.num_events > self._sequence:
            raise RecordError(
                f"{self._path} has {self._sequence} events, but {head.num_events} were there: its end is lost",
                hint="put the file back; what is left can be read, not continued",
            )

    def put_blob(self, data: bytes) -> str:
        return self.blobs.put(data)

    def close(self) -> None:
        """Sync to the disk and give up the lock. Idempotent."""
        with self._guard:
            if not self._file.closed:
                try:
                    self._sync()
                except RecordError:
                    if not self._failed:  # else it was told already
                        raise
                finally:
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
    size, length = path.stat().st_size, TAIL_BYTES
    with path.open("rb") as file:
        while True:  # until the last whole line is in it
            file.seek(max(0, size - length))
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if length >= size or data.rfind(b"\n", 0, max(0, whole - 1)) >= 0:
                break
            length *= 8
    torn = len(data) - whole
    if torn:
        os.truncate(path, size - torn)
    lines = data[:whole].splitlines()
    if not lines:
        return 0, GENESIS, torn
    try:
        last = msgspec.json.decode(lines[-1], type=Envelope)
    except msgspec.DecodeError as error:
        hint = "the run cannot be continued; tandem runs show still reads what is whole"
        raise RecordError(f"{path}: last event is broken: {error}", hint=hint) from error
    return last.sequence + 1, digest(lines[-1]), torn
