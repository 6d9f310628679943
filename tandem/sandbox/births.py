"""How boxes come to be: made from a template or a snapshot, or born of a fork, and entered into the table.

Owns: the names of boxes, and that a record is there before its box is made and goes again when that fails. Invariant:
no box is left that no record knows.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, TandemError
from tandem.core.events import SandboxCreated, SandboxFailed
from tandem.core.protocols import EventSink
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Root
from tandem.sandbox.entry import Entry
from tandem.sandbox.leases import Templates
from tandem.sandbox.pool import Pool
from tandem.sandbox.reach import Reach
from tandem.sandbox.records import BoxRecord, Child, Life, now
from tandem.sandbox.session import Session
from tandem.sandbox.snapshot import Snapshots
from tandem.sandbox.table import Table
from tandem.sandbox.transitions import Transitions


class Note(Protocol):
    def __call__(self, action: str, subject: str = "", actor: str = "", **detail: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Births:
    """``enter`` makes a box one of the manager's, ``watch`` starts its deadline, ``note`` writes the audit log."""

    table: Table
    snapshots: Snapshots
    transitions: Transitions
    pool: Pool
    templates: Templates | None
    sink: EventSink
    enter: Callable[[BoxRecord, Box | None], Entry]
    watch: Callable[[Entry], None]
    reach: Reach
    note: Note
    closed: Callable[[], bool]
    _prefix: str = field(default_factory=lambda: secrets.token_hex(3))
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def create(
        self, spec: SandboxSpec, life: Life, snapshot: str, root: Root | None, actor: str = ""
    ) -> Session:
        """One box. Raises as the manager's ``create``."""
        sandbox_id = self._next_id()
        started = time.monotonic()
        record = self._record(sandbox_id, spec, life)
        self.note("create", sandbox_id, actor, template=spec.template, snapshot=snapshot)
        self.table.insert(record)
        with contextlib.ExitStack() as held:  # until the box is entered, which holds what it stands on
            lease = None
            try:
                if not snapshot and root is None and self.templates is not None:
                    lease = await self.templates.lend(spec.template)
                if lease is not None:
                    held.callback(lease.release)
                    root = lease.root
                box, parent = await self._made(sandbox_id, spec, snapshot, root)
                if self.closed():
                    await box.kill()
                    raise SandboxError("the sandbox manager was closed")
            except TandemError as error:
                self.table.remove(sandbox_id)
                await self.snapshots.drop_all(sandbox_id)
                self.sink.emit(SandboxFailed(sandbox_id=sandbox_id, error=type(error).__name__, detail=error.message))
                raise
            session = await self._arrived(record, box, parent, time.monotonic() - started)
        if lease is not None:
            try:
                await lease.starting.run(session, lease.root)
            except BaseException as error:
                await session.kill()
                if isinstance(error, TandemError):
                    detail = error.message
                    self.sink.emit(SandboxFailed(sandbox_id=sandbox_id, error=type(error).__name__, detail=detail))
                raise
        return session

    async def _made(
        self, sandbox_id: str, spec: SandboxSpec, snapshot: str, root: Root | None
    ) -> tuple[Box, str]:
        """A box and the snapshot that it stands on ('' for none)."""
        if snapshot:
            return await self._from_snapshot(sandbox_id, spec, snapshot)
        return await (self.pool.lease(spec) if root is None else self.transitions.make(spec, root=root)), ""

    async def _arrived(self, record: BoxRecord, box: Box, parent: str, create_s: float) -> Session:
        """A box that was just made becomes one of ours."""
        entry = self.enter(record, box)
        try:
            await self.reach.open(entry)
            entry.change(state=SandboxState.RUNNING, intent="", parent=parent, handle=box.handle,
                         started_at=now(), deadline=now() + record.lifetime_s)
        except TandemError:
            await entry.session.kill()
            raise
        self.watch(entry)
        entry.say("info", "created", template=record.spec.template)
        self.sink.emit(SandboxCreated(
            sandbox_id=record.id, backend=record.backend, template=record.spec.template, create_s=create_s
        ))
        return entry.session

    async def _from_snapshot(self, sandbox_id: str, spec: SandboxSpec, name: str) -> tuple[Box, str]:
        found = self.snapshots.find(name)
        self.snapshots.hold(found.id, sandbox_id)
        if not found.live:
            return await self.transitions.make(spec, root=await self.snapshots.root(found.id)), found.id
        backend = self.transitions.backend
        if Ability.LIVE_SNAPSHOT not in backend.abilities:
            raise refuse(backend.name, Ability.LIVE_SNAPSHOT)
        folder = await self.snapshots.processes(found.id)
        return await backend.restore(folder, spec, timeout_s=self.transitions.create_timeout_s), found.id

    async def fork(self, entry: Entry, num_children: int, live: bool, life: Life | None) -> list[Child]:
        """A result per child. Raises as the manager's ``fork``."""
        parent = entry.record
        life = life or Life(
            lifetime_s=parent.lifetime_s, on_timeout=parent.on_timeout, auto_resume=parent.auto_resume,
            metadata=parent.metadata,
        )
        ids = [self._next_id() for _ in range(num_children)]
        records = [self._record(each, replace(parent.spec, hostname=entry.child_hostname()), life) for each in ids]
        started, specs, snapshot_id = time.monotonic(), [record.spec for record in records], ""
        try:
            for record in records:
                self.table.insert(record)
            if live:
                if parent.parent and self.snapshots.has(parent.parent):  # they stand on it, too
                    snapshot_id = parent.parent
                    for each in ids:
                        self.snapshots.hold(snapshot_id, each)
                boxes = await self.transitions.fork_live(entry, specs)
            else:
                snapshot_id, boxes = await self.transitions.fork_files(entry, specs, ids)
        except BaseException:
            for each in ids:
                self.table.remove(each)
                await self.snapshots.drop_all(each)
            raise
        took_s = time.monotonic() - started
        return [await self._child(record, box, snapshot_id, took_s)
                for record, box in zip(records, boxes, strict=True)]

    async def _child(self, record: BoxRecord, box: Box | Exception, snapshot_id: str, took_s: float) -> Child:
        if isinstance(box, Exception):
            self.table.remove(record.id)
            await self.snapshots.drop_all(record.id)
            if isinstance(box, SandboxError):
                return Child(error=box)
            return Child(error=SandboxError(f"a child of a fork failed: {type(box).__name__}: {box}"))
        try:
            return Child(session=await self._arrived(record, box, snapshot_id, took_s))
        except SandboxError as error:
            return Child(error=error)

    def _record(self, sandbox_id: str, spec: SandboxSpec, life: Life) -> BoxRecord:
        lifetime_s = spec.limits.lifetime_s if life.lifetime_s is None else life.lifetime_s
        return BoxRecord(
            id=sandbox_id, spec=spec, state=SandboxState.CREATING, intent="create", metadata=dict(life.metadata),
            backend=self.transitions.backend.name, created_at=now(), lifetime_s=lifetime_s, on_timeout=life.on_timeout,
            auto_resume=life.auto_resume,
        )

    def _next_id(self) -> str:
        return f"sbx-{self._prefix}-{next(self._numbers)}"
