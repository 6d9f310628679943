"""All boxes of one process: makes them, knows them, and leaves none behind.

Owns: every verb on boxes and snapshots, their names, lifetimes and events. Two lives: in the trainer's process (no
state folder; a table in memory, all boxes end at ``close``), and as a server (``state``: what is known outlives the
process, ``open`` takes up what it left, every verb is in the audit log).
Refuses: to create after ``close``. Invariant: a box is in the table from before its creation to after its end;
``close`` returns when no box is left and nothing of any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import Isolation, NetworkPolicy, SandboxLimits, SandboxSpec, SandboxState
from tandem.core.errors import (
    ConfigError,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    TandemError,
)
from tandem.core.events import SandboxFailed, SandboxKilled, SandboxRefused
from tandem.core.protocols import EventSink
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.audit import AuditLog
from tandem.sandbox.backend import Box, Root, SandboxBackend, Usage
from tandem.sandbox.births import Births
from tandem.sandbox.deadlines import Deadlines
from tandem.sandbox.entry import Entry
from tandem.sandbox.factory import make_backend
from tandem.sandbox.leases import Leases, Rooted, Templates, paths_of
from tandem.sandbox.listing import PAGE_BOXES, page_of
from tandem.sandbox.network.attempts import Attempt
from tandem.sandbox.network.policy import check
from tandem.sandbox.network.refusal import Refused
from tandem.sandbox.pool import Pool
from tandem.sandbox.reach import Bound, Reach, unbounded
from tandem.sandbox.records import (
    BoxRecord,
    Child,
    Life,
    LogLine,
    Page,
    PauseMode,
    SnapshotRecord,
    now,
)
from tandem.sandbox.recovery import Recovery, recover
from tandem.sandbox.session import Session
from tandem.sandbox.snapshot import Snapshots
from tandem.sandbox.store import BlobStore
from tandem.sandbox.table import MemoryTable, SqliteTable
from tandem.sandbox.tasks import Tasks
from tandem.sandbox.transitions import Transitions

MOST_CHILDREN = 100
WARM_SPECS = 4  # a server keeps boxes warm for the last few that were asked for


def spec_of(section: SandboxSection) -> SandboxSpec:
    """The box that the recipe describes. Raises ConfigError for a network rule that is none, naming its key."""
    network = section.network
    for key, rules in (("allow", network.allow), ("deny", network.deny)):
        try:
            check(NetworkPolicy(allow=rules))
        except ConfigError as error:
            raise ConfigError(f"sandbox.network.{key}: {error.message}", hint=error.hint) from None
    return SandboxSpec(
        network=NetworkPolicy(
            internet=network.internet, allow=network.allow, deny=network.deny, private=network.allow,
            connections=network.connections, total_bytes=network.total_mb * 2**20,
        ),
        template=section.template,
        limits=SandboxLimits(
            memory_bytes=section.memory_mb * 2**20,
            cpus=section.cpus,
            pids=section.pids,
            disk_bytes=section.disk_mb * 2**20,
            output_bytes=section.output_kb * 2**10,
            lifetime_s=section.lifetime_s,
        ),
        isolation=Isolation[section.isolation.upper()],
    )


class SandboxManager:
    """Core's ``SandboxService`` and all that a server needs. Its methods belong to one event loop.

    Every verb takes the id of a box and raises ``SandboxGone`` for one that is dead or was never there, and
    ``SandboxUnavailable`` for what the backend cannot do. Verbs on one box wait for each other, ``kill`` for none. A
    verb whose caller is cancelled is finished all the same.
    """

    def __init__(
        self,
        section: SandboxSection,
        sink: EventSink,
        *,
        backend: SandboxBackend | None = None,
        state: Path | None = None,
        store: str = "",
        templates: Templates | None = None,
        bound: Bound = unbounded,
    ) -> None:
        """``state``: the folder of what outlives the process; then call ``open`` first. ``store``: where durable
        snapshots go, a folder or any URL of fsspec ('': in the state folder). ``templates`` lends what boxes
        start from; None: there are the backend's own only. ``bound`` makes of the network policy that is asked for the
        one that a box gets.

        Raises:
            SandboxError: another server has the folder. RecordError: it cannot be read.
        """
        self._section = section
        self._sink = sink
        self._backend = backend or make_backend(section)
        self._pool = Pool(self._make, size=section.warm, num_specs=1 if state is None else WARM_SPECS)
        # A backend without images has templates of its own, under its own names.
        self._templates = templates if Ability.IMAGES in self._backend.abilities else None
        self._leases = Leases(self._freed)
        self._table = MemoryTable() if state is None else SqliteTable(state)
        if state is not None:
            blobs = BlobStore(store or str(state / "blobs"))
            self.snapshots = Snapshots(self._table, blobs, state, self._leases)
        else:
            self.snapshots = Snapshots(self._table, leases=self._leases)
        self.audit = None if state is None else AuditLog(state / "audit")
        self._reach = Reach(backend=self._backend, bound=bound, note=self._note_network)
        self._transitions = Transitions(
            backend=self._backend, snapshots=self.snapshots, sink=sink, create_timeout_s=section.create_timeout_s,
            reach=self._reach,
        )
        self._tasks = Tasks()
        self._deadlines = Deadlines(transitions=self._transitions, sink=sink, note=self._note, own=self._tasks.own)
        self._births = Births(
            table=self._table, snapshots=self.snapshots, transitions=self._transitions, pool=self._pool,
            templates=self._templates, sink=sink, enter=self._enter, reach=self._reach, watch=self._deadlines.watch,
            note=self._note, closed=lambda: self._closed,
        )
        self._entries: dict[str, Entry] = {}
        self._closed = False

    # ---- the manager's own life

    @property
    def backend(self) -> SandboxBackend:
        return self._backend

    @property
    def live(self) -> dict[str, Session]:
        """The boxes that are alive, by id (a copy)."""
        return {entry.id: entry.session for entry in self._entries.values()}

    async def open(self) -> Recovery:
        """Take up what an earlier process left in the state folder: boxes that still live are adopted, boxes that
        were in the middle of a move go back to where they rested, the rest is swept away. Before the first verb."""
        recovery = await recover(self._table, self._backend, self.snapshots, self._enter)
        for entry in list(self._entries.values()):
            self._deadlines.watch(entry)
            try:
                await self._reach.open(entry)
            except TandemError as error:  # a box without what it was promised would fail in ways nobody understands
                entry.say("error", f"killed: {error.message}")
                self._note("kill", entry.id, why=error.message)
                await self._kill(entry)
        for box_id in recovery.lost:
            self._sink.emit(SandboxFailed(sandbox_id=box_id, error="SandboxGone", detail="lost with its server"))
        self._note("open", detail=recovery.summary())
        return recovery

    async def check(self, spec: SandboxSpec) -> None:
        """Make one box and end it, so that a machine that cannot is known before anything dear is started.

        Raises:
            SandboxUnavailable: with what failed and what to do.
        """
        try:
            self._reach.require(spec)
            lease = await self._templates.lend(spec.template) if self._templates is not None else None
            try:
                box = await self._transitions.make(spec, root=lease.root) if lease else await self._make(spec)
                await box.kill()
            finally:
                if lease:
                    lease.release()
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise SandboxUnavailable(f"this machine makes no boxes: {error.message}", hint=error.hint) from error

    async def close(self) -> None:
        """Kill all boxes, running and paused, and wait until they are gone. Durable snapshots stay."""
        self._closed = True
        await self._pool.close()
        for entry in list(self._entries.values()):
            self._tasks.own(entry.session.kill())
        await self._backend.close()
        await self._tasks.settled()
        await self.snapshots.close()
        self._shut()

    async def leave(self) -> None:
        """End this process's part and leave every box as it is to the next ``open`` on the same state folder; where
        the backend's boxes cannot outlive it, as ``close``."""
        self._closed = True
        await self._pool.close()
        await self._tasks.settled()
        for entry in self._entries.values():
            entry.stop_timer()
        await self._backend.leave()
        for entry in self._entries.values():
            with suppress(Refused):  # then it stays counted a step too high
                entry.budget.settle()
        await self.snapshots.close()
        self._note("leave")
        self._shut()

    # ---- boxes

    async def create(
        self, spec: SandboxSpec, *, life: Life | None = None, snapshot: str = "", root: Root | None = None,
        actor: str = "",
    ) -> Session:
        """A running box: from the spec's template, from a ``snapshot`` (id or name), or from a ``root``.

        Raises:
            SandboxUnavailable: this machine cannot. SandboxError: it failed. SnapshotMissing, SnapshotCorrupt.
        """
        if self._closed:
            raise SandboxError("the sandbox manager is closed")
        self._reach.require(spec)
        return await self._tasks.finish(self._births.create(spec, life or Life(), snapshot, root, actor))

    def get(self, sandbox_id: str) -> BoxRecord:
        """What is known of a box now."""
        return self._entry(sandbox_id).record

    def session(self, sandbox_id: str) -> Session:
        """The box's commands and files. Using a paused one resumes it where its life says ``auto_resume``, else
        raises SandboxError."""
        return self._entry(sandbox_id).session

    def boxes(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        states: Sequence[SandboxState] = (),
        limit: int = PAGE_BOXES,
        after: str = "",
    ) -> Page:
        """Boxes whose metadata has all these pairs, and which are in one of ``states`` (empty: any), oldest first;
        ``after`` is the ``next`` of the page before."""
        records = (entry.record for entry in self._entries.values())
        return page_of(records, metadata=metadata or {}, states=states, limit=limit, after=after)

    async def kill(self, sandbox_id: str, *, actor: str = "") -> bool:
        """From every state; returns when nothing of the box is left. False: there is no such box (any more)."""
        entry = self._entries.get(sandbox_id)
        if entry is None:
            return False
        self._note("kill", sandbox_id, actor)
        await self._tasks.finish(self._kill(entry))
        return True

    async def pause(self, sandbox_id: str, *, mode: PauseMode = PauseMode.WARM, actor: str = "") -> bool:
        """Its processes stand still, its deadline no longer counts. False: it was paused already."""
        entry = self._entry(sandbox_id)
        self._note("pause", sandbox_id, actor, mode=mode.value)
        done = await self._tasks.finish(self._transitions.pause(entry, mode))
        entry.stop_timer()
        return done

    async def resume(self, sandbox_id: str, *, lifetime_s: float | None = None, actor: str = "") -> bool:
        """It runs again, for ``lifetime_s`` (None: as long as its last run). False: it was running, and nothing
        changed (``set_timeout`` and ``refresh`` change deadlines)."""
        entry = self._entry(sandbox_id)
        self._note("resume", sandbox_id, actor)
        done = await self._tasks.finish(self._transitions.resume(entry, lifetime_s))
        if done:
            self._deadlines.watch(entry)
        return done

    async def fork(
        self, sandbox_id: str, num_children: int, *, live: bool = False, life: Life | None = None, actor: str = ""
    ) -> list[Child]:
        """Siblings that start from the box's files of this moment (``live``: and its running processes); the box
        goes on as it was. One result per child; None of them stays when the box is killed meanwhile.

        Raises:
            ValueError: not 1 to 100 children. SandboxUnavailable: it cannot be forked (live), saying why.
        """
        if not 1 <= num_children <= MOST_CHILDREN:
            raise ValueError(f"a fork has 1 to {MOST_CHILDREN} children, not {num_children}")
        entry = self._entry(sandbox_id)
        self._note("fork", sandbox_id, actor, children=str(num_children), live=str(live))
        return await self._tasks.finish(self._births.fork(entry, num_children, live, life))

    async def snapshot(
        self, sandbox_id: str, *, name: str = "", live: bool = False, durable: bool | None = None, actor: str = ""
    ) -> SnapshotRecord:
        """The box's files (``live``: and processes) at this moment; it goes on as it was. ``durable`` (None: where
        there is a state folder) outlives this process and was written when this returns; else it ends with it.

        Raises:
            SnapshotError: no room, no store; then there is no snapshot.
        """
        entry = self._entry(sandbox_id)
        self._note("snapshot", sandbox_id, actor, name=name)
        durable = self.snapshots.can_keep if durable is None else durable
        return await self._tasks.finish(self._transitions.snapshot(entry, name=name, live=live, durable=durable))

    async def delete_snapshot(self, snapshot: str, *, actor: str = "") -> bool:
        """Boxes that stand on it go on. False: it was deleted already. Raises SnapshotMissing."""
        self._note("delete snapshot", snapshot, actor)
        return await self._tasks.finish(self.snapshots.delete(snapshot))

    def set_timeout(self, sandbox_id: str, lifetime_s: float, *, actor: str = "") -> None:
        """The box ends (or pauses) this many seconds from now, earlier or later than before. Of a paused box: how
        long its next run takes."""
        entry = self._entry(sandbox_id)
        self._note("set timeout", sandbox_id, actor, lifetime_s=f"{lifetime_s:g}")
        paused = entry.record.deadline is None
        entry.change(lifetime_s=lifetime_s, deadline=None if paused else now() + lifetime_s)
        self._deadlines.watch(entry)

    def refresh(self, sandbox_id: str, lifetime_s: float, *, actor: str = "") -> None:
        """As ``set_timeout``, but never earlier than before."""
        deadline = self._entry(sandbox_id).record.deadline
        if deadline is None or now() + lifetime_s > deadline:
            self.set_timeout(sandbox_id, lifetime_s, actor=actor)

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy, *, actor: str = "") -> None:
        """What the box may reach from now on, running or paused; connections that it forbids now are cut. Commands
        that run already keep the proxy variables they were started with.

        Raises:
            ConfigError: a rule is none. SandboxUnavailable: the backend has no networks. SandboxError.
        """
        entry = self._entry(sandbox_id)
        check(policy)
        self._note("network", sandbox_id, actor, internet=str(policy.internet), allow=" ".join(policy.allow),
                   deny=" ".join(policy.deny))
        await self._tasks.finish(self._reach.change(entry, policy))

    async def usage(self, sandbox_id: str) -> Usage:
        """What the box costs now; nothing is known of one whose processes are gone."""
        entry = self._entry(sandbox_id)
        if Ability.USAGE not in self._backend.abilities:
            raise refuse(self._backend.name, Ability.USAGE)
        return Usage() if entry.session.box is None else await entry.session.box.usage()

    def logs(self, sandbox_id: str, *, since: float = 0.0, limit: int = 1000) -> Sequence[LogLine]:
        """What was done to the box and what it did, oldest first: the last thousand lines."""
        lines = [line for line in self._entry(sandbox_id).log if line.time >= since]
        return lines[:limit]

    def log(self, sandbox_id: str, message: str, *, level: str = "info", **fields: str) -> None:
        """Add a line to the box's log."""
        self._entry(sandbox_id).say(level, message, **fields)

    # ---- how

    def _note_network(self, sandbox_id: str, attempt: Attempt) -> None:
        """Raises RecordError; then the connection is not made."""
        if not attempt.allowed:
            self._sink.emit(SandboxRefused(
                sandbox_id=sandbox_id, target=attempt.target, why=attempt.why, suppressed=attempt.suppressed
            ))
        self._note("connect", sandbox_id, sandbox_id, allowed=str(attempt.allowed), target=attempt.target,
                   why=attempt.why, suppressed=str(attempt.suppressed or ""))

    async def _kill(self, entry: Entry) -> None:
        await entry.session.kill()
        await self.snapshots.drop_all(entry.id)

    def _enter(self, record: BoxRecord, box: Box | None) -> Entry:
        """One more box, at rest."""

        async def use() -> None:
            await self.resume(record.id)

        def begin_kill() -> None:
            entry.begin_kill()

        session = Session(
            record.id, record.spec, box, on_end=self._ended, on_use=use if record.auto_resume else None,
            on_kill=begin_kill, paused=record.state is SandboxState.PAUSED,
        )
        entry = self._entries[record.id] = Entry(record, session, self._table)
        if isinstance(box, Rooted):
            try:
                self._leases.hold(record.id, paths_of(box.root))
            except SandboxError as error:  # it was removed while no server was there
                entry.say("error", f"it runs on, but cannot be forked any more: {error.message}")
        return entry

    async def _make(self, spec: SandboxSpec) -> Box:
        return await self._transitions.make(spec)

    def _entry(self, sandbox_id: str) -> Entry:
        entry = self._entries.get(sandbox_id)
        if entry is None:
            raise SandboxGone(f"there is no sandbox {sandbox_id!r}", hint="it ended, or never was; create a new one")
        return entry

    def _ended(self, session: Session, lost: str) -> None:
        """``lost`` says how a box ended that nobody killed."""
        entry = self._entries.pop(session.id, None)
        if entry is None:
            return
        entry.forget()
        self._leases.drop(session.id)
        self._tasks.own(self.snapshots.drop_all(session.id))
        if lost:
            self._note("lost", session.id, why=lost)
            self._sink.emit(SandboxFailed(sandbox_id=session.id, error="SandboxGone", detail=lost))
        else:
            self._sink.emit(SandboxKilled(sandbox_id=session.id, lifetime_s=now() - entry.record.created_at))

    def _note(self, action: str, subject: str = "", actor: str = "", **detail: str) -> None:
        if self.audit is not None:
            self.audit.append(action, subject=subject, actor=actor, **detail)

    def _freed(self) -> None:
        """A layer of an image is used no more."""
        if self._templates is not None and not self._closed:
            self._tasks.own(self._templates.tidy())

    def _shut(self) -> None:
        self._leases.close()
        self._table.close()
        if self.audit is not None:
            self.audit.close()

