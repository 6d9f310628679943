"""The contract of a sandbox backend: what a way to isolate must give so that manager and session work on it.

Owns: the records that cross it. A backend isolates, runs calls with hard caps and deadlines, and leaves nothing
behind; identity, lifecycle, events, snapshots by name and the public faces are the manager's and the session's.
A backend says what it can (``abilities``) and how it isolates; a verb it has not raises ``SandboxUnavailable``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from tandem.core.boxes import Isolation, NetworkPolicy, SandboxSpec
from tandem.sandbox.abilities import Ability
from tandem.sandbox.network.attempts import Tell
from tandem.sandbox.network.budget import Budget

HOME = "/home/agent"


class CallKind(StrEnum):
    RUN = "x"
    WRITE = "w"
    READ = "r"
    LIST = "l"
    STAT = "s"
    ENTRIES = "e"  # arguments: path, depth
    MAKE_FOLDER = "m"
    MOVE = "v"  # arguments: from, to
    REMOVE = "d"  # with all below
    # only as a long-lived command, which ends with an errno as its code
    READ_PARTS = "R"  # for each byte on stdin the next MiB of the file
    WATCH = "i"  # arguments: folder, "1" for all below. On stdout a letter, a path and a NUL: k (it watches from now
    # on), then c (created or moved here), w (written), d (removed), m (moved away), a (attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One thing to do in a box: a command (``arguments`` is its argv) or a file operation (its path)."""

    kind: CallKind = CallKind.RUN
    arguments: Sequence[str]
    timeout_s: float
    folder: str = HOME
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    stdout_cap_bytes: int
    stderr_cap_bytes: int
    on_stdout: Callable[[bytes], None] | None = None
    on_stderr: Callable[[bytes], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended. ``code`` is None when it was killed by its deadline; for file operations it is an errno."""

    code: int | None
    stdout: bytes
    stderr: bytes
    dropped_bytes: int
    timed_out: bool
    started: bool
    oom_killed: bool
    duration_s: float


# ---- long-lived commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A pseudo-terminal's size."""

    columns: int = 80
    rows: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command that outlives the call that starts it. ``timeout_s`` is the life of its whole process group; None:
    until it ends or the box does. ``user`` is ``agent``, ``root`` (of the box, never of the host), or
    numbers of the box: ``UID:GID`` and its other groups after further colons (``users`` finds a name's). A ``kind``
    other than ``RUN`` is a file operation as such a command, for ``Ability.FILE_STREAMS``."""

    kind: CallKind = CallKind.RUN
    arguments: Sequence[str]
    folder: str = HOME
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = "agent"
    timeout_s: float | None = None
    terminal: Terminal | None = None  # output then comes as one stream, on stdout
    stdin: bool = False  # False: stdin is empty


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a process's output, in the order the box sent it. ``lost_bytes`` came before it and are gone: this
    listener was slower than the command by more than is kept, or came too late."""

    stream: str  # "stdout", "stderr" or "pty"
    data: bytes
    lost_bytes: int = 0


class Process(Protocol):
    """One running command. Output is kept (to a cap, the oldest goes first) for whoever connects late; nobody
    listening never blocks or kills it."""

    @property
    def pid(self) -> int:
        """Its number inside the box."""
        ...

    def output(self, *, from_start: bool = False) -> AsyncIterator[Piece]:
        """Pieces until the process ends; ``from_start`` first gives what is kept. Raises SandboxGone when the box
        dies first: a stream is then aborted, not ended."""
        ...

    async def wait(self) -> Outcome:
        """Its end (stdout and stderr empty: they went to ``output``). Raises SandboxGone."""
        ...

    async def send_stdin(self, data: bytes) -> None:
        """Raises SandboxError (no stdin, or closed)."""
        ...

    async def close_stdin(self) -> None: ...

    async def resize(self, terminal: Terminal) -> None: ...

    async def signal(self, number: int) -> None:
        """To the whole process group."""
        ...


# ---- roots, snapshots -------------------------------------------------------------------------------------------


class LayerKind(StrEnum):
    FOLDER = "folder"  # a directory
    EROFS = "erofs"  # an EROFS image file
    EROFS_TAR = "erofs_tar"  # an EROFS index over a raw tar (``device``)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One immutable layer of a root; whiteouts as overlayfs writes them. ``digest`` names its content where it is
    known ('' in memory only)."""

    kind: LayerKind = LayerKind.FOLDER
    path: Path
    device: Path | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a box's file system starts from: ``layers``, top first, over the host template's base (``host_base``) or
    over nothing (an image that brings its own system), and what its image says about commands."""

    layers: tuple[Layer, ...] = ()
    host_base: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""  # '' : agent
    folder: str = ""  # '' : HOME


class Frozen(Protocol):
    """The files of a box at one moment, held until ``release``: boxes can be made from ``root`` meanwhile. It lives
    as long as this process; ``save`` makes it durable."""

    @property
    def root(self) -> Root: ...

    @property
    def live(self) -> bool:
        """Whether running processes are in it."""
        ...

    async def save(self, folder: Path) -> Root:
        """Write all that is not durable yet as files under ``folder`` (and fsync); the root that a later process
        can start boxes from."""
        ...

    async def release(self) -> None:
        """Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a box costs now. None: this machine does not tell."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    disk_total_bytes: int | None = None


class Box(Protocol):
    """One live box of a backend. Only ``call``, ``kill`` and ``gone`` are asked of every backend; the rest raises
    ``SandboxUnavailable`` where ``abilities`` says no."""

    @property
    def gone(self) -> asyncio.Future[str]:
        """Done when nothing of the box is left; the value says how it ended."""
        ...

    @property
    def handle(self) -> str:
        """What ``adopt`` of a later process knows the box by; '' where it dies with this process."""
        ...

    async def call(self, call: Call) -> Outcome:
        """Raises SandboxGone (the box died), SandboxTimeout (it does not answer; it is being killed)."""
        ...

    async def start(self, start: Start) -> Process:
        """Returns when the command runs. Raises OSError (not found, not executable), SandboxGone, SandboxTimeout."""
        ...

    async def pause(self, *, cold: bool = False) -> None:
        """Stop all processes; ``cold`` gives their memory back too. Calls in flight wait; deadlines are measured in
        the box's own running time. Idempotent: also brings a half-paused box to rest."""
        ...

    async def resume(self) -> None:
        """Idempotent: a running box is left alone, a half-paused one runs again."""
        ...

    async def snapshot(self, *, live: bool = False) -> Frozen:
        """The files (``live``: and processes) at one moment; the box goes on as it was, running or paused."""
        ...

    async def fork(self, specs: Sequence[SandboxSpec], *, timeout_s: float) -> list[Box | Exception]:
        """Siblings with the running processes of this box, one per spec, each with its own identity; a result for
        each. Raises SandboxUnavailable when this box cannot be forked live, saying why."""
        ...

    async def set_network(self, policy: NetworkPolicy, tell: Tell, budget: Budget | None = None) -> None:
        """What the box may reach from now on, running or paused; connections that it forbids now are cut. A box has
        no network until then. ``tell`` hears of every attempt to reach something; ``budget`` counts what passes
        (None: from 0).

        Raises:
            ConfigError: a rule is none. SandboxError: something in the box has the proxy's port.
        """
        ...

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To a server in the box on its loopback. Raises ConnectionRefusedError, SandboxGone."""
        ...

    async def usage(self) -> Usage: ...

    async def kill(self) -> None:
        """Idempotent, from every state; returns when nothing of the box is left."""
        ...


@runtime_checkable
class Carrier(Protocol):
    """A box that a live fork may have made."""

    @property
    def carried(self) -> Process | None:
        """The command that its live fork copied, running on, with streams of its own; None: it was not born so."""
        ...

    @property
    def carried_start(self) -> Start | None:
        """What that command was started with, in the parent or before."""
        ...


class SandboxBackend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    @property
    def abilities(self) -> frozenset[Ability]:
        """What boxes of this backend can on this machine."""
        ...

    async def create(self, spec: SandboxSpec, *, root: Root | None = None, timeout_s: float) -> Box:
        """A box, without the network of its spec until ``set_network``; ``root`` None: the spec's template, which
        must be ``host``. Raises SandboxUnavailable (also for a network that it could not have), SandboxError,
        SandboxTimeout."""
        ...

    async def restore(self, frozen: Path, spec: SandboxSpec, *, timeout_s: float) -> Box:
        """A box with the processes of a saved live snapshot. Raises SandboxUnavailable, SandboxError."""
        ...

    async def adopt(self) -> dict[str, Box]:
        """Before the first ``create``: the boxes that an earlier process left alive (it was killed, or it called
        ``leave``), by handle. The rest of what it left is swept away. Empty where boxes die with their process."""
        ...

    async def leave(self) -> None:
        """Give up this process's hold and leave every box as it is to the next ``adopt``; as ``close`` where there
        is no adoption."""
        ...

    async def close(self) -> None:
        """Kill all boxes; afterwards nothing of any of them is left."""
        ...
