"""The contract of a sandbox backend: what a way to isolate must give so that manager and session work on it.

Owns: the records that cross it. A backend isolates, runs calls with hard caps and deadlines, and leaves nothing
behind; identity, lifecycle, events and the public faces are the manager's and the session's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tandem.core.boxes import SandboxSpec

HOME = "/home/agent"


class CallKind(StrEnum):
    RUN = "x"
    WRITE = "w"
    READ = "r"
    LIST = "l"


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


class Box(Protocol):
    """One live box of a backend."""

    @property
    def gone(self) -> asyncio.Future[str]:
        """Done when nothing of the box is left; the value says how it ended."""
        ...

    async def call(self, call: Call) -> Outcome:
        """Raises SandboxGone (the box died), SandboxTimeout (it does not answer; it is being killed)."""
        ...

    async def kill(self) -> None:
        """Idempotent; returns when nothing of the box is left."""
        ...


class SandboxBackend(Protocol):
    @property
    def name(self) -> str: ...

    async def create(self, spec: SandboxSpec, *, timeout_s: float) -> Box:
        """Raises SandboxUnavailable, SandboxError, SandboxTimeout."""
        ...

    async def close(self) -> None:
        """Kill all boxes; afterwards nothing of any of them is left."""
        ...
