"""The records of sandboxes: what a box is asked to be, what state it is in, how a command in it ended.

Owns: every sandbox type that crosses a package wall. Refuses: behaviour, I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Isolation(enum.IntEnum):
    """What stands between a box and the host; a larger one is stronger."""

    SHARED_KERNEL = 1  # namespaces: holds careless code
    USER_KERNEL = 2  # a kernel in user space between box and host (gVisor)
    MACHINE = 3  # a virtual machine


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    memory_bytes: int = 512 * 2**20
    cpus: float = 1.0
    pids: int = 64
    disk_bytes: int = 256 * 2**20
    output_bytes: int = 256 * 2**10  # kept of each stream of one command
    lifetime_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicy:
    """Where a box may connect to. The default is no network at all. With ``internet`` every public address that no
    rule denies is reachable; without it only what ``allow`` names. A rule is an address, a CIDR block or a domain
    (``*.example.org`` for all below it), with a port or ports if wanted (``10.0.0.5:5432``); ``allow`` wins over
    ``deny``. Loopback, private, link-local and metadata addresses, and the host's own (so other boxes and the control
    plane) are reachable only where ``private`` names them, too. ``private`` and ``never`` (which wins over all) are
    the operator's, never a client's."""

    internet: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    connections: int = 64  # open at a time
    total_bytes: int = 4 * 2**30  # in both directions together, over the box's whole life

    @property
    def none(self) -> bool:
        return not self.internet and not self.allow


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A request for a box: template ``host`` is this machine's ``/usr`` read-only, all else private. ``isolation``
    is the least that will do."""

    template: str = "host"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    environment: dict[str, str] = field(default_factory=dict)
    hostname: str = "box"
    network: NetworkPolicy = NetworkPolicy()
    isolation: Isolation = Isolation.SHARED_KERNEL


class SandboxState(enum.StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. ``exit_code`` is None when it was killed by its deadline; a signal death is
    128 + signal. ``truncated`` says that output went past the cap and the rest was dropped (counted in
    ``dropped_bytes``)."""

    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool = False
    dropped_bytes: int = 0
    timed_out: bool = False
    oom_killed: bool = False
    duration_s: float = 0.0
