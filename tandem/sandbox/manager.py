"""All boxes of one process: makes them, knows them, and leaves none behind.

Owns: the registry of live boxes, their names, their lifetimes, their events, and the warm pool.
Refuses: to create after ``close``. Invariant: a box is in the registry from its creation to its end; ``close``
returns when the registry is empty and nothing of any box is left.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import cast

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import PluginError, SandboxError, SandboxUnavailable, TandemError, boundary
from tandem.core.events import SandboxCreated, SandboxFailed, SandboxKilled
from tandem.core.protocols import EventSink
from tandem.core.registry import Registry
from tandem.sandbox.backend import Box, SandboxBackend
from tandem.sandbox.pool import Pool
from tandem.sandbox.session import Session

BACKENDS = {"namespace": "tandem.sandbox.backends.namespace:NamespaceBackend"}


def spec_of(section: SandboxSection) -> SandboxSpec:
    """The box that the recipe describes."""
    return SandboxSpec(
        template=section.template,
        limits=SandboxLimits(
            memory_bytes=section.memory_mb * 2**20,
            cpus=section.cpus,
            pids=section.pids,
            disk_bytes=section.disk_mb * 2**20,
            output_bytes=section.output_kb * 2**10,
            lifetime_s=section.lifetime_s,
        ),
    )


class SandboxManager:
    """Core's ``SandboxService``. Its methods belong to one event loop."""

    def __init__(self, section: SandboxSection, sink: EventSink, *, backend: SandboxBackend | None = None) -> None:
        self._section = section
        self._sink = sink
        self._backend = backend or _make_backend(section.backend)
        self._pool = Pool(self._make, size=section.warm)
        self._live: dict[str, Session] = {}
        self._born: dict[str, float] = {}
        self._lifetimes: dict[str, asyncio.TimerHandle] = {}
        self._killing: set[asyncio.Task[None]] = set()
        self._prefix = secrets.token_hex(3)
        self._count = 0
        self._closed = False

    @property
    def live(self) -> dict[str, Session]:
        """The boxes that are alive, by id (a copy)."""
        return dict(self._live)

    async def create(self, spec: SandboxSpec) -> Session:
        if self._closed:
            raise SandboxError("the sandbox manager is closed")
        self._count += 1
        sandbox_id = f"sbx-{self._prefix}-{self._count}"
        started = time.monotonic()
        try:
            box = await self._pool.lease(spec)
        except TandemError as error:
            self._sink.emit(SandboxFailed(sandbox_id=sandbox_id, error=type(error).__name__, detail=error.message))
            raise
        if self._closed:
            await box.kill()
            raise SandboxError("the sandbox manager was closed")
        now = time.monotonic()
        session = Session(sandbox_id, spec, box, on_end=self._ended)
        self._live[sandbox_id] = session
        self._born[sandbox_id] = now
        self._lifetimes[sandbox_id] = asyncio.get_running_loop().call_later(
            spec.limits.lifetime_s, self._expire, session
        )
        self._sink.emit(SandboxCreated(
            sandbox_id=sandbox_id, backend=self._backend.name, template=spec.template, create_s=now - started
        ))
        return session

    async def check(self, spec: SandboxSpec) -> None:
        """Make one box and end it, so that a machine that cannot is known before anything dear is started.

        Raises:
            SandboxUnavailable: with what failed and what to do.
        """
        try:
            box = await self._make(spec)
            await box.kill()
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise SandboxUnavailable(f"this machine makes no boxes: {error.message}", hint=error.hint) from error

    async def close(self) -> None:
        self._closed = True
        await self._pool.close()
        for session in list(self._live.values()):
            self._kill_soon(session)
        await self._backend.close()
        if self._killing:
            await asyncio.gather(*self._killing, return_exceptions=True)

    async def _make(self, spec: SandboxSpec) -> Box:
        return await self._backend.create(spec, timeout_s=self._section.create_timeout_s)

    def _kill_soon(self, session: Session) -> None:
        task = asyncio.get_running_loop().create_task(session.kill())
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    def _expire(self, session: Session) -> None:
        self._sink.emit(SandboxFailed(
            sandbox_id=session.id, error="lifetime", detail=f"older than {session.spec.limits.lifetime_s:g} s"
        ))
        self._kill_soon(session)

    def _ended(self, session: Session, lost: str) -> None:
        """``lost`` says how a box ended that nobody killed."""
        if self._live.pop(session.id, None) is None:
            return
        self._lifetimes.pop(session.id).cancel()
        lifetime_s = time.monotonic() - self._born.pop(session.id)
        if lost:
            self._sink.emit(SandboxFailed(sandbox_id=session.id, error="SandboxGone", detail=lost))
        else:
            self._sink.emit(SandboxKilled(sandbox_id=session.id, lifetime_s=lifetime_s))


def _make_backend(name: str) -> SandboxBackend:
    factory = Registry("sandbox", BACKENDS).resolve(name)
    with boundary(PluginError, f"sandbox backend {name!r} cannot be made"):
        return cast(Callable[[], SandboxBackend], factory)()
