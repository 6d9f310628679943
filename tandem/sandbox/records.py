"""What a manager remembers of boxes and snapshots, and what its verbs answer.

Owns: the records that outlive a process, and how they are written. Refuses: behaviour.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError
from tandem.sandbox.session import Session


class OnTimeout(enum.StrEnum):
    KILL = "kill"
    PAUSE = "pause"


class PauseMode(enum.StrEnum):
    WARM = "warm"  # the processes stand still
    COLD = "cold"  # and their memory is given back
    FILES = "files"  # only the files are kept; a resumed box starts no process again


class BoxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One box. Times are seconds since the epoch. ``intent`` says what a state that is not at rest was for, and
    where it came from: what a later process needs to undo it."""

    id: str
    spec: SandboxSpec
    state: SandboxState
    intent: str = ""
    version: int = 0  # counts every change: what compare-and-set compares
    metadata: dict[str, str] = {}
    backend: str = ""
    handle: str = ""  # the backend's name for the box; '' when it dies with this process
    created_at: float = 0.0
    started_at: float = 0.0  # when it last began to run
    lifetime_s: float = 0.0  # of each run
    deadline: float | None = None  # None while paused
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    parent: str = ""  # the snapshot its files started from
    network_bytes: int = 0  # it has had through its proxy; see ``network.budget``
    saved: str = ""  # the snapshot that is all that is left of a box paused with its files only


class StoredLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a durable snapshot: blobs in the store, or (``external``) a file that something else keeps."""

    kind: str
    blob: str = ""
    device: str = ""
    num_bytes: int = 0
    external: str = ""
    external_device: str = ""

    def blobs(self) -> list[str]:
        return [each for each in (self.blob, self.device) if each]


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of a box's files. ``layers`` (top first) is empty while it is in memory only, and of a box that
    never wrote."""

    id: str
    name: str = ""
    parent: str = ""  # the snapshot before it; '' for the first
    sandbox_id: str = ""
    spec: SandboxSpec
    created_at: float = 0.0
    durable: bool = False
    kept: bool = True  # a user asked for it and did not delete it; else it goes with its last holder
    live: bool = False  # running processes are in it
    layers: tuple[StoredLayer, ...] = ()
    host_base: bool = True
    environment: dict[str, str] = {}
    user: str = ""
    folder: str = ""

    def blobs(self) -> list[str]:
        return [blob for layer in self.layers for blob in layer.blobs()]


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    time: float
    level: str
    message: str
    fields: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the boxes; ``next`` asks for those after them, and is empty on the last page."""

    boxes: list[BoxRecord]
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What became of one child of a fork: exactly one of the two is there."""

    session: Session | None = None
    error: SandboxError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How long a box runs and what then. ``lifetime_s`` None: as its spec says."""

    lifetime_s: float | None = None
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False  # using a paused box resumes it
    metadata: Mapping[str, str] = field(default_factory=dict)


def now() -> float:
    return time.time()
