"""Boxes as a program uses them: ``async with Sandbox.create("python") as box: await box.commands.run("ls")``.

Owns: one object for one box with all its verbs, and the manager of a box that nobody gave a manager. Refuses: to leave
a box behind: leaving the context kills it, its forks, and what else its own manager made.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import NetworkPolicy, SandboxLimits, SandboxSpec, SandboxState
from tandem.core.errors import SandboxError
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backend import Usage
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import Life, OnTimeout, PauseMode, SnapshotRecord
from tandem.sandbox.session import Commands, Files


class Sandbox:
    """One box. Made by ``create`` and by ``fork``."""

    def __init__(self, manager: SandboxManager, sandbox_id: str) -> None:
        self._manager = manager
        self._session = manager.session(sandbox_id)

    @staticmethod
    def create(
        template: str = "host",
        *,
        limits: SandboxLimits | None = None,
        environment: Mapping[str, str] | None = None,
        network: NetworkPolicy | None = None,
        snapshot: str = "",
        lifetime_s: float | None = None,
        on_timeout: OnTimeout = OnTimeout.KILL,
        auto_resume: bool = True,
        metadata: Mapping[str, str] | None = None,
        manager: SandboxManager | None = None,
        state: Path | None = None,
    ) -> Opening:
        """A running box: ``host`` is this machine's own programs, any other template is one of
        ``tandem sandbox template ls``. ``snapshot``: start from its files instead. ``manager`` None: one of its own,
        with ``state`` as its folder of durable snapshots.

        Raises:
            SandboxUnavailable: this machine cannot make it, or has no such template. SandboxError.
        """
        spec = SandboxSpec(
            template=template, limits=limits or SandboxLimits(), environment=dict(environment or {}),
            network=network or NetworkPolicy(),
        )
        life = Life(
            lifetime_s=lifetime_s, on_timeout=on_timeout, auto_resume=auto_resume, metadata=dict(metadata or {})
        )
        return Opening(spec, life, snapshot, manager, state)

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def state(self) -> SandboxState:
        return self._session.state

    @property
    def commands(self) -> Commands:
        return self._session.commands

    @property
    def files(self) -> Files:
        return self._session.files

    async def pause(self, *, mode: PauseMode = PauseMode.WARM) -> bool:
        """Using it resumes it, unless it was made with ``auto_resume=False``. False: it was paused already."""
        return await self._manager.pause(self.id, mode=mode)

    async def resume(self) -> bool:
        """False: it was running."""
        return await self._manager.resume(self.id)

    async def snapshot(self, name: str = "", *, live: bool = False) -> SnapshotRecord:
        """Its files (``live``: and processes) at this moment, for ``create(snapshot=...)``."""
        return await self._manager.snapshot(self.id, name=name, live=live)

    async def fork(self, num_children: int = 1, *, live: bool = False) -> list[Sandbox | SandboxError]:
        """Siblings with its files of this moment (``live``: and its running command, which each of them has as
        ``commands.carried``), or why one is missing."""
        children = await self._manager.fork(self.id, num_children, live=live)
        return [
            child.error or SandboxError("a child of a fork is missing") if child.session is None
            else Sandbox(self._manager, child.session.id)
            for child in children
        ]

    def set_timeout(self, lifetime_s: float) -> None:
        """It ends this many seconds from now."""
        self._manager.set_timeout(self.id, lifetime_s)

    async def usage(self) -> Usage:
        return await self._manager.usage(self.id)

    async def kill(self) -> bool:
        """Idempotent; False: it was dead."""
        return await self._manager.kill(self.id)


class Opening:
    """A box that is about to be: ``async with`` kills it at the end; ``await`` leaves it to its manager, which then
    must be given: who else would end it?"""

    def __init__(
        self, spec: SandboxSpec, life: Life, snapshot: str, manager: SandboxManager | None, state: Path | None
    ) -> None:
        self._spec, self._life, self._snapshot = spec, life, snapshot
        self._manager, self._state = manager, state
        self._open = contextlib.AsyncExitStack()

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._left_to_its_manager().__await__()

    async def _left_to_its_manager(self) -> Sandbox:
        if self._manager is None:
            hint = "async with Sandbox.create(...), or give a manager"
            raise SandboxError("a box needs someone to end it", hint=hint)
        session = await self._manager.create(self._spec, life=self._life, snapshot=self._snapshot)
        return Sandbox(self._manager, session.id)

    async def __aenter__(self) -> Sandbox:
        manager = self._manager
        try:
            if manager is None:
                manager = await self._open.enter_async_context(_manager(self._spec, self._state))
            session = await manager.create(self._spec, life=self._life, snapshot=self._snapshot)
            if self._manager is not None:
                self._open.push_async_callback(manager.kill, session.id)
        except BaseException:
            await self._open.aclose()
            raise
        return Sandbox(manager, session.id)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()


@contextlib.asynccontextmanager
async def _manager(spec: SandboxSpec, state: Path | None) -> AsyncIterator[SandboxManager]:
    library = None if spec.template == "host" else ImageLibrary()
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), state=state, templates=library)
    try:
        await manager.open()
        yield manager
    finally:
        await manager.close()
