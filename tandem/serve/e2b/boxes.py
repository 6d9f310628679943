"""The boxes of a manager as the HTTP face needs them: by id, with what clients opened in them.

Owns: per box, the tables of commands, watchers and kernels that clients made over HTTP; they end with the box. Refuses:
state of boxes, which is the manager's alone. Invariant: an entry lives no longer than its session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Process, Start, Usage
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import BoxRecord, Life, LogLine, PauseMode, SnapshotRecord
from tandem.sandbox.session import Session
from tandem.sandbox.users import NoSuchUser, as_user
from tandem.serve.e2b import shapes
from tandem.serve.e2b.box_files import ProgramFiles
from tandem.serve.e2b.box_streams import StreamFiles
from tandem.serve.e2b.called import CalledProcess
from tandem.serve.e2b.faults import Fault, not_found, not_running
from tandem.serve.e2b.files import BoxFiles
from tandem.serve.e2b.templates import Build, Template, TemplateList

T = TypeVar("T")
MAX_BOXES = 1_000_000  # of one list: all


@runtime_checkable
class Closable(Protocol):
    async def close(self) -> None: ...


class Entry:
    """One box, as the in-box services see it."""

    def __init__(self, session: Session, abilities: frozenset[Ability]) -> None:
        self.session = session
        self._abilities = abilities
        self._kept: dict[str, Any] = {}

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def files(self) -> BoxFiles:
        if Ability.FILE_STREAMS in self._abilities:
            return self.keep("files", lambda: StreamFiles(self.id, self.start))
        can_watch = Ability.PROCESSES in self._abilities
        return self.keep("files", lambda: ProgramFiles(self.session, self.start, can_watch=can_watch))

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """What belongs to the box under this name, made at its first use."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    async def start(self, start: Start) -> Process:
        if Ability.PROCESSES not in self._abilities:
            await self.session.use()
            return CalledProcess(self.session, start)
        box = await self.session.use()
        if Ability.FILE_STREAMS in self._abilities:
            try:
                start = await as_user(box.start, start)
            except NoSuchUser as error:
                raise Fault(401, error.message) from error
        return await box.start(start)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if Ability.PORTS not in self._abilities:
            raise refuse("box's", Ability.PORTS)
        return await (await self.session.use()).connect(port)

    async def close(self) -> None:
        for one in self._kept.values():
            if isinstance(one, Closable):
                with suppress(Exception):  # the box is gone, and what stood on it may say so
                    await one.close()


WarmUp = Callable[[Entry, Sequence[str]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a box uses now. None: this machine does not tell."""

    cpu_s: float | None
    cpu_pct: float | None
    memory_bytes: int | None
    disk_bytes: int | None
    processes: int | None


class Boxes:
    """Verbs by id. ``spec`` is what boxes are unless a client asks otherwise; ``aliases`` are template names that
    clients use without having made them; ``may_internet``: whether a box may have the open internet at all."""

    def __init__(
        self,
        manager: SandboxManager,
        spec: SandboxSpec,
        *,
        aliases: dict[str, str],
        may_internet: bool,
        templates: TemplateList,
        library: ImageLibrary,
    ) -> None:
        self.manager = manager
        self.spec = spec
        self._aliases = aliases
        self._may_internet = may_internet
        self._templates, self._library = templates, library
        self._entries: dict[str, Entry] = {}
        self._samples: dict[str, tuple[float, float]] = {}

    # ---- one box
    def record(self, sandbox_id: str) -> BoxRecord:
        """Raises: Fault 404."""
        try:
            record = self.manager.get(sandbox_id)
        except SandboxGone:
            raise not_found(sandbox_id) from None
        if record.state in (SandboxState.DEAD, SandboxState.KILLING):
            raise not_found(sandbox_id)
        return record

    def entry(self, sandbox_id: str) -> Entry:
        """For the in-box services: a box that runs, or that its use resumes.

        Raises:
            Fault 502, in the words of E2B's proxy.
        """
        try:
            record = self.record(sandbox_id)
            session = self.manager.session(sandbox_id)
        except (Fault, SandboxError):
            raise not_running(sandbox_id) from None
        if record.state is SandboxState.PAUSED and not record.auto_resume:
            raise not_running(sandbox_id)
        entry = self._entries.get(sandbox_id)
        if entry is None or entry.session is not session:
            self._forget_dead()
            entry = self._entries[sandbox_id] = Entry(session, self.manager.backend.abilities)
        return entry

    def records(self) -> list[BoxRecord]:
        return [record for record in self._all() if record.state not in
                (SandboxState.DEAD, SandboxState.KILLING, SandboxState.CREATING)]  # fmt: skip

    def _all(self) -> list[BoxRecord]:
        return self.manager.boxes(limit=MAX_BOXES).boxes

    # ---- verbs
    async def create(
        self, asked: shapes.NewSandbox, *, timeout_s: float, actor: str, warm_up: WarmUp | None = None
    ) -> BoxRecord:
        """``warm_up`` imports the modules that a template names."""
        found = self._templates.find(asked.template_id)
        built = found[1] if found else Build(id="")
        template, snapshot = self._origin(asked.template_id, found)
        image = None if snapshot else await asyncio.to_thread(self._library.index.get, template)
        policy = shapes.policy_of(asked.network, asked.allow_internet_access, may_internet=self._may_internet)
        limits = self.spec.limits
        spec = replace(
            self.spec,
            template=template,
            limits=replace(
                limits,
                cpus=float(built.cpu_count) or limits.cpus,
                memory_bytes=built.memory_mb * 2**20 or limits.memory_bytes,
            ),
            environment=self.spec.environment | (image.config.environment if image else {}) | (asked.env_vars or {}),
            network=policy,
        )
        public = asked.network.allow_public_traffic is not False
        metadata = (asked.metadata or {}) | {shapes.ALIAS: asked.template_id}
        life = Life(
            lifetime_s=timeout_s,
            on_timeout=shapes.on_timeout(asked.auto_pause),
            auto_resume=asked.auto_resume.enabled,
            metadata=metadata if public else metadata | {shapes.PUBLIC: "false"},
        )
        session = await self.manager.create(spec, life=life, snapshot=snapshot, actor=actor)
        if found is not None:
            found[0].spawned, found[0].last_spawned_at = found[0].spawned + 1, time.time()
        if image is not None and image.warm and warm_up is not None:
            try:
                await warm_up(self.entry(session.id), image.warm)
            except BaseException:
                await self.manager.kill(session.id)
                raise
        return self.record(session.id)

    async def connect(self, sandbox_id: str, *, timeout_s: float, actor: str) -> tuple[BoxRecord, bool]:
        """Running from now on, for at least ``timeout_s`` more; and whether it was paused."""
        before = self.record(sandbox_id)
        paused = shapes.shown_state(before.state) == "paused"
        if paused:
            await self.manager.resume(sandbox_id, lifetime_s=timeout_s, actor=actor)
        self.manager.refresh(sandbox_id, timeout_s, actor=actor)
        return self.record(sandbox_id), paused

    async def kill(self, sandbox_id: str, *, actor: str) -> None:
        self.record(sandbox_id)
        await self.manager.kill(sandbox_id, actor=actor)
        self._forget_dead()

    async def pause(self, sandbox_id: str, *, mode: PauseMode, actor: str) -> bool:
        """False: it was paused already."""
        self.record(sandbox_id)
        return await self.manager.pause(sandbox_id, mode=mode, actor=actor)

    async def fork(
        self, sandbox_id: str, count: int, *, timeout_s: float, live: bool = False, actor: str
    ) -> list[BoxRecord | Exception]:
        before = self.record(sandbox_id)
        life = Life(lifetime_s=timeout_s, on_timeout=before.on_timeout, auto_resume=before.auto_resume,
                    metadata=before.metadata)  # fmt: skip
        children = await self.manager.fork(sandbox_id, count, live=live, life=life, actor=actor)
        return [
            self.record(child.session.id) if child.session is not None else child.error or SandboxError("no child")
            for child in children
        ]

    async def snapshot(self, sandbox_id: str, *, name: str, actor: str) -> SnapshotRecord:
        self.record(sandbox_id)
        return await self.manager.snapshot(sandbox_id, name=name, actor=actor)

    def snapshots(self, sandbox_id: str) -> list[SnapshotRecord]:
        return self.manager.snapshots.kept(sandbox_id=sandbox_id)

    def set_timeout(self, sandbox_id: str, seconds: float, *, actor: str) -> None:
        """Ends that many seconds from now."""
        self.record(sandbox_id)
        self.manager.set_timeout(sandbox_id, seconds, actor=actor)

    def refresh(self, sandbox_id: str, seconds: float, *, actor: str) -> None:
        """Ends no sooner than that many seconds from now."""
        self.record(sandbox_id)
        self.manager.refresh(sandbox_id, seconds, actor=actor)

    async def set_network(self, sandbox_id: str, asked: shapes.Network, *, actor: str) -> None:
        """It stands in the place of what was before, as a whole."""
        self.record(sandbox_id)
        policy = shapes.policy_of(asked, None, may_internet=self._may_internet)
        await self.manager.set_network(sandbox_id, policy, actor=actor)

    async def usage(self, sandbox_id: str) -> Cost:
        """``cpu_pct`` is that of the time since the last look, or since it started."""
        record = self.record(sandbox_id)
        told = Ability.USAGE in self.manager.backend.abilities
        usage = await self.manager.usage(sandbox_id) if told else Usage()
        now = time.time()
        pct = None
        if usage.cpu_s is not None:
            since, used_s = self._samples.get(sandbox_id, (record.started_at, 0.0))
            self._samples[sandbox_id] = (now, usage.cpu_s)
            pct = max(0.0, 100 * (usage.cpu_s - used_s) / max(now - since, 1e-3))
        return Cost(cpu_s=usage.cpu_s, cpu_pct=pct, memory_bytes=usage.memory_bytes, disk_bytes=usage.disk_bytes,
                    processes=usage.processes)  # fmt: skip

    def note(self, action: str, subject: str = "", *, actor: str, **detail: str) -> None:
        """Into the audit log, what no verb of the manager tells. Raises RecordError; then it must not happen."""
        if self.manager.audit is not None:
            self.manager.audit.append(action, subject=subject, actor=actor, **detail)

    def logs(self, sandbox_id: str, *, since: float, limit: int) -> list[LogLine]:
        self.record(sandbox_id)
        return list(self.manager.logs(sandbox_id, since=since, limit=limit))

    async def close(self) -> None:
        while self._entries:
            await self._entries.popitem()[1].close()

    async def delete_snapshot(self, name: str, *, actor: str) -> bool:
        """False: there is none of this name."""
        if not any(name in (one.id, one.name) for one in self.manager.snapshots.kept()):
            return False
        return await self.manager.delete_snapshot(name, actor=actor)

    def _origin(self, name: str, found: tuple[Template, Build] | None) -> tuple[str, str]:
        """The backend's template and the snapshot (or '') that a box of this name starts from."""
        if found is not None:
            return f"{found[0].name}:{found[1].id}", ""
        if any(name in (one.id, one.name) for one in self.manager.snapshots.kept()):
            return self.spec.template, name
        return self._aliases.get(name, name), ""

    def _forget_dead(self) -> None:
        for name in [name for name, one in self._entries.items() if one.session.state is SandboxState.DEAD]:
            entry = self._entries.pop(name)
            self._samples.pop(name, None)
            asyncio.ensure_future(entry.close())

