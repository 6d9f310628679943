"""The records of sandboxes: what a box is asked to be, what state it is in, how a command in it ended.

Owns: every sandbox type that crosses a package wall. Refuses: behaviour, I/O.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    memory_bytes: int = 512 * 2**20
    cpus: float = 1.0
    pids: int = 64
    disk_bytes: int = 256 * 2**20
    output_bytes: int = 256 * 2**10  # kept of each stream of one command
    lifetime_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A request for a box: template ``host`` is this machine's ``/usr`` read-only, all else private."""

    template: str = "host"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    environment: dict[str, str] = field(default_factory=dict)
    hostname: str = "box"


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
