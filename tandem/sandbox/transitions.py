"""The moves of one box that take time: pause, resume, snapshot, fork.

Owns: the order of each: intent written, the physical step, the new state written, then seen; and the way back when a
step fails. Invariant: after a failed move the box is where it was, or it is gone; never something in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SnapshotError, boundary
from tandem.core.events import SandboxFailed, SandboxMoved
from tandem.core.protocols import EventSink
from tandem.sandbox.abilities import Ability, refuse, refuse_isolation
from tandem.sandbox.backend import Box, Root, SandboxBackend
from tandem.sandbox.entry import Entry
from tandem.sandbox.reach import Reach
from tandem.sandbox.records import PauseMode, SnapshotRecord, now
from tandem.sandbox.snapshot import Snapshots

T = TypeVar("T")
STEP_TIMEOUT_S = 60.0  # of one physical step


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    backend: SandboxBackend
    snapshots: Snapshots
    sink: EventSink
    create_timeout_s: float
    reach: Reach

    async def pause(self, entry: Entry, mode: PauseMode) -> bool:
        """False: it was paused already (a cold pause then still gives the memory back)."""
        self._require({PauseMode.WARM: Ability.PAUSE, PauseMode.COLD: Ability.COLD_PAUSE}.get(mode, Ability.SNAPSHOT))
        async with entry.turn():
            if entry.state is SandboxState.PAUSED:
                if mode is PauseMode.COLD and entry.session.box is not None:
                    await _step(entry, entry.box.pause(cold=True), "giving its memory back")
                return False
            started = time.monotonic()
            entry.move(SandboxState.PAUSING, intent=f"pause {mode.value}")
            async with self._or_back(entry, SandboxState.RUNNING, entry.box.resume):
                saved = ""
                if mode is not PauseMode.FILES or Ability.PAUSE in self.backend.abilities:
                    await _step(entry, entry.box.pause(cold=mode is PauseMode.COLD), "pausing")
                if mode is PauseMode.FILES:
                    saved = await self._save_files(entry)
                try:
                    entry.move(SandboxState.PAUSED, intent="", deadline=None, saved=saved)
                except BaseException:
                    await self.snapshots.drop(saved, entry.id)
                    raise
            if saved and (box := entry.session.box) is not None:
                entry.session.bind(None)
                await box.kill()
            self._moved(entry, f"pause {mode.value}", started)
            return True

    async def resume(self, entry: Entry, lifetime_s: float | None) -> bool:
        """False: it was running."""
        async with entry.turn():
            if entry.state is SandboxState.RUNNING:
                return False
            started = time.monotonic()
            saved, record = entry.record.saved, entry.record
            entry.move(SandboxState.RESUMING, intent="resume")
            async with self._or_back(entry, SandboxState.PAUSED, lambda: self._still(entry, saved)):
                if saved:
                    box = await self.make(record.spec, root=await self.snapshots.root(saved))
                    if entry.ending:
                        await box.kill()
                    else:
                        entry.session.bind(box)
                        await self.reach.open(entry)
                else:
                    await _step(entry, entry.box.resume(), "resuming")
                lifetime_s = record.lifetime_s if lifetime_s is None else lifetime_s
                entry.move(
                    SandboxState.RUNNING, intent="", saved="", parent=saved or record.parent, started_at=now(),
                    lifetime_s=lifetime_s, deadline=now() + lifetime_s, handle=entry.box.handle,
                )
            if saved and record.parent and record.parent != saved:
                await self.snapshots.drop(record.parent, entry.id)
            self._moved(entry, "resume", started)
            return True

    async def snapshot(self, entry: Entry, *, name: str, live: bool, durable: bool) -> SnapshotRecord:
        self._require(Ability.LIVE_SNAPSHOT if live else Ability.SNAPSHOT)
        if durable and not self.snapshots.can_keep:
            raise SnapshotError("a durable snapshot needs a store", hint="give the manager a state folder")
        async with entry.turn():
            if entry.record.saved:
                return await self.snapshots.alias(
                    self.snapshots.find(entry.record.saved), sandbox_id=entry.id, name=name
                )
            started = time.monotonic()
            frozen = None
            try:
                async with self._beside(entry, SandboxState.SNAPSHOTTING, "snapshot"):
                    frozen = await _step(entry, entry.box.snapshot(live=live), "its snapshot")
            except BaseException:
                if frozen is not None:
                    await frozen.release()
                raise
            record = await self.snapshots.add(
                frozen, entry.record.spec, sandbox_id=entry.id, parent=entry.record.parent, name=name,
                durable=durable, kept=True, holder=entry.id,
            )
            if live:  # whose files are a copy: the box goes on on what it stood on
                await self.snapshots.drop(record.id, entry.id)
            else:
                await self._stand_on(entry, record.id)
            if not entry.ending:
                self._moved(entry, "snapshot", started)
            return record

    async def fork_files(
        self, entry: Entry, specs: Sequence[SandboxSpec], ids: Sequence[str]
    ) -> tuple[str, list[Box | Exception]]:
        """The snapshot that the children stand on, held by each of ``ids`` (also when this fails: the caller drops
        it), and the children."""
        self._require(Ability.SNAPSHOT)
        async with entry.turn():
            started = time.monotonic()
            if entry.record.saved:
                snapshot_id = entry.record.saved
                for each in ids:
                    self.snapshots.hold(snapshot_id, each)
                return snapshot_id, await self._make_all(specs, await self.snapshots.root(snapshot_id))
            async with self._beside(entry, SandboxState.FORKING, f"fork into {len(specs)}"):
                frozen = await _step(entry, entry.box.snapshot(), "its snapshot")
                record = await self.snapshots.add(
                    frozen, entry.record.spec, sandbox_id=entry.id, parent=entry.record.parent, durable=False,
                    kept=False, holder=ids[0],
                )
                for each in ids if entry.ending else (*ids, entry.id):
                    self.snapshots.hold(record.id, each)
                children = await self._make_all(specs, frozen.root)
                await self._none_without(entry, children)
            await self._stand_on(entry, record.id)
            self._moved(entry, "fork", started)
            return record.id, children

    async def fork_live(self, entry: Entry, specs: Sequence[SandboxSpec]) -> list[Box | Exception]:
        self._require(Ability.LIVE_FORK)
        async with entry.turn():
            started = time.monotonic()
            async with self._beside(entry, SandboxState.FORKING, f"live fork into {len(specs)}"):
                children = await _step(
                    entry, entry.box.fork(specs, timeout_s=self.create_timeout_s), "its fork"
                )
                await self._none_without(entry, children)
            self._moved(entry, "live fork", started)
            return children

    async def _none_without(self, entry: Entry, children: Sequence[Box | Exception]) -> None:
        """A parent that was killed while it forked has no children."""
        if entry.ending:
            for child in children:
                if not isinstance(child, Exception):
                    await child.kill()

    async def make(self, spec: SandboxSpec, *, root: Root | None = None) -> Box:
        """A box. Raises SandboxUnavailable, SandboxError, SandboxTimeout."""
        if spec.isolation > self.backend.isolation:
            raise refuse_isolation(self.backend.name, self.backend.isolation, spec.isolation)
        if root is None:
            return await self.backend.create(spec, timeout_s=self.create_timeout_s)
        return await self.backend.create(spec, root=root, timeout_s=self.create_timeout_s)

    async def _make_all(self, specs: Sequence[SandboxSpec], root: Root) -> list[Box | Exception]:
        made = await asyncio.gather(*(self.make(spec, root=root) for spec in specs), return_exceptions=True)
        for each in made:
            if isinstance(each, BaseException) and not isinstance(each, Exception):
                raise each
        return [each for each in made if not isinstance(each, BaseException) or isinstance(each, Exception)]

    async def _save_files(self, entry: Entry) -> str:
        frozen = await _step(entry, entry.box.snapshot(), "its snapshot")
        record = await self.snapshots.add(
            frozen, entry.record.spec, sandbox_id=entry.id, parent=entry.record.parent,
            durable=self.snapshots.can_keep, kept=False, holder=entry.id,
        )
        return record.id

    async def _still(self, entry: Entry, saved: str) -> None:
        """Back to paused: what a resume that failed had begun is undone."""
        if not saved:
            await entry.box.pause()
        elif (box := entry.session.box) is not None:
            entry.session.bind(None)
            await box.kill()

    async def _stand_on(self, entry: Entry, snapshot_id: str) -> None:
        """The box's next snapshot comes after this one, and this one stays while the box lives."""
        before = entry.record.parent
        if entry.ending:
            await self.snapshots.drop(snapshot_id, entry.id)
            return
        entry.change(parent=snapshot_id)
        if before and before != snapshot_id:
            await self.snapshots.drop(before, entry.id)

    @contextlib.asynccontextmanager
    async def _beside(self, entry: Entry, state: SandboxState, intent: str) -> AsyncIterator[None]:
        """A move during which the box goes on as it was."""
        rest, box = entry.state, entry.box
        entry.move(state, intent=f"{intent} from {rest.value}")
        resting = box.resume if rest is SandboxState.RUNNING else box.pause
        async with self._or_back(entry, rest, resting):
            yield
            entry.move(rest, intent="")

    @contextlib.asynccontextmanager
    async def _or_back(
        self, entry: Entry, rest: SandboxState, physically: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """When the body fails: the box goes back to ``rest``, or is killed when it cannot."""
        try:
            with _of_the_backend(entry):
                yield
        except SandboxError as error:
            if entry.ending:
                raise SandboxGone(
                    f"sandbox {entry.id} ended meanwhile: {error.message}", hint="create a new one"
                ) from error
            self.sink.emit(SandboxFailed(sandbox_id=entry.id, error=type(error).__name__, detail=error.message))
            entry.say("error", error.message)
            await self._go_back(entry, rest, physically)
            raise

    async def _go_back(
        self, entry: Entry, rest: SandboxState, physically: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            with _of_the_backend(entry):
                await _step(entry, physically(), f"going back to {rest}")
            entry.settle(rest)
        except SandboxError as error:
            if not entry.ending:
                entry.say("error", f"killed: {error.message}")
            await entry.session.kill()

    def _require(self, ability: Ability) -> None:
        if ability not in self.backend.abilities:
            raise refuse(self.backend.name, ability)

    def _moved(self, entry: Entry, verb: str, started: float) -> None:
        entry.say("info", verb)
        self.sink.emit(SandboxMoved(
            sandbox_id=entry.id, verb=verb, state=entry.state.value, took_s=time.monotonic() - started
        ))


def _of_the_backend(entry: Entry) -> contextlib.AbstractContextManager[None]:
    return boundary(SandboxError, f"sandbox {entry.id}: its backend failed")


async def _step(entry: Entry, step: Awaitable[T], what: str) -> T:
    """Whatever a backend raises leaves here as ours, so that a verb outside ``_or_back`` has typed errors, too."""
    with _of_the_backend(entry):
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                return await step
        except TimeoutError as error:
            raise SandboxTimeout(f"sandbox {entry.id}: {what} did not end in {STEP_TIMEOUT_S:g} s") from error
