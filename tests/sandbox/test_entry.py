"""Lives of boxes in any order of verbs, faults and pairs of verbs at once, against what must always hold."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from folderbox import FolderBackend
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backend import Box
from tandem.sandbox.entry import Entry
from tandem.sandbox.lifecycle import AT_REST
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import BoxRecord, PauseMode
from tandem.sandbox.session import Session
from tandem.sandbox.table import MemoryTable, StaleRecord

VERBS = st.sampled_from(["pause", "files", "cold", "resume", "fork", "live fork", "snapshot", "kill"])


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.num_dead = 0
        self.do(self._open())

    async def _open(self) -> None:
        folder = Path(self.scratch.name)
        self.backend = FolderBackend(folder / "backend", processes=False)
        self.manager = SandboxManager(
            SandboxSection(warm=0), NowhereSink(), backend=self.backend, state=folder / "state"
        )

    def do(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        async def all_of_it() -> list[Any]:
            async with asyncio.timeout(30):
                ends = await asyncio.gather(*work, return_exceptions=True)
                await self.manager._tasks.settled()
                return ends

        ends = self.loop.run_until_complete(all_of_it())
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, SandboxError):
                raise end
        return ends

    def verb(self, name: str, box: str) -> Coroutine[Any, Any, Any]:
        match name:
            case "pause" | "files" | "cold":
                return self.manager.pause(box, mode=PauseMode("warm" if name == "pause" else name))
            case "fork" | "live fork":
                return self.manager.fork(box, 2, live=name == "live fork")
            case "snapshot":
                return self.manager.snapshot(box, durable=len(self.manager.snapshots.kept()) % 2 == 0)
            case _:
                return getattr(self.manager, name)(box)

    @property
    def ids(self) -> list[str]:
        return list(self.manager.live)

    @precondition(lambda self: len(self.ids) < 6)
    @rule()
    def create(self) -> None:
        (session,) = self.do(self.manager.create(SandboxSpec()))
        assert isinstance(session, Session)

    @precondition(lambda self: self.ids)
    @rule(name=VERBS, pick=st.integers(0, 99))
    def one(self, name: str, pick: int) -> None:
        box = self.ids[pick % len(self.ids)]
        before = self.manager.get(box).state
        (end,) = self.do(self.verb(name, box))
        if name == "kill":
            assert end is True and box not in self.manager.live
        elif name in ("pause", "files", "cold"):
            assert end is (before is SandboxState.RUNNING) and self.manager.get(box).state is SandboxState.PAUSED
        elif name == "resume":
            assert end is (before is SandboxState.PAUSED) and self.manager.get(box).state is SandboxState.RUNNING
        elif not isinstance(end, SandboxError):
            assert self.manager.get(box).state is before

    @precondition(lambda self: self.ids)
    @rule(names=st.lists(VERBS, min_size=2, max_size=4), pick=st.integers(0, 99))
    def several_at_once(self, names: list[str], pick: int) -> None:
        box = self.ids[pick % len(self.ids)]
        self.do(*(self.verb(name, box) for name in names))
        assert ("kill" in names) == (box not in self.manager.live)

    @precondition(lambda self: self.ids)
    @rule(name=VERBS, pick=st.integers(0, 99), faults=st.sets(
        st.sampled_from(["pause", "resume", "snapshot", "create", "fork"]), min_size=1, max_size=3
    ))
    def one_that_fails(self, name: str, pick: int, faults: set[str]) -> None:
        box = self.ids[pick % len(self.ids)]
        before = self.manager.get(box).state
        self.backend.faults = {fault: RuntimeError("broken") for fault in faults}
        (end,) = self.do(self.verb(name, box))
        self.backend.faults = {}
        if isinstance(end, SandboxError) and box in self.manager.live:
            assert self.manager.get(box).state is before, "neither back nor gone"

    @precondition(lambda self: self.manager.snapshots.kept())
    @rule(pick=st.integers(0, 99), delete=st.booleans())
    def use_or_delete_a_snapshot(self, pick: int, delete: bool) -> None:
        kept = self.manager.snapshots.kept()
        record = kept[pick % len(kept)]
        if delete:
            assert self.do(self.manager.delete_snapshot(record.id)) == [True]
        elif len(self.ids) < 6:
            (session,) = self.do(self.manager.create(SandboxSpec(), snapshot=record.id))
            assert isinstance(session, Session)

    @invariant()
    def what_is_said_is_so(self) -> None:
        live = self.manager.live
        table = {record.id: record for record in self.manager._table.boxes()}
        assert set(table) == set(live)
        handles: set[str] = set()
        for box_id, session in live.items():
            record = self.manager.get(box_id)
            assert table[box_id] == record and record.state is session.state and session.state in AT_REST
            assert record.intent == "" and (record.deadline is None) == (record.state is SandboxState.PAUSED)
            assert (session.box is None) == bool(record.saved)
            if session.box is not None:
                assert not session.box.gone.done() and session.box.handle == record.handle
                handles.add(record.handle)
                paused = self.backend.boxes[record.handle].paused
                assert paused == (session.state is SandboxState.PAUSED)
        assert handles == set(self.backend.boxes)

    def teardown(self) -> None:
        for record in self.manager.snapshots.kept():
            self.do(self.manager.delete_snapshot(record.id))
        self.do(*(self.manager.kill(box) for box in self.ids))
        assert not self.backend.boxes and self.backend.num_frozen == 0 and not self.manager.snapshots._nodes
        assert self.manager._table.boxes() == [] and self.manager._table.snapshots() == []
        self.loop.run_until_complete(self.manager.close())
        self.loop.close()
        self.scratch.cleanup()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


def entry_of(table: MemoryTable, box: Box | None = None) -> Entry:
    record = BoxRecord(id="sbx-1", spec=SandboxSpec(), state=SandboxState.RUNNING)
    table.insert(record)
    return Entry(record, Session("sbx-1", record.spec, box, on_end=lambda *_: None), table)


def test_a_state_is_seen_only_when_it_is_written() -> None:
    table = MemoryTable()
    entry = entry_of(table)
    table.remove("sbx-1")  # whatever the reason, it cannot be written
    with pytest.raises(StaleRecord):
        entry.move(SandboxState.PAUSING, intent="pause")
    assert entry.state is SandboxState.RUNNING and entry.record.version == 0
    entry.begin_kill()
    assert entry.state is SandboxState.KILLING and "could not be recorded" in entry.log[-1].message


def test_a_turn_is_given_to_one_at_a_time_and_not_to_the_dead() -> None:
    async def main() -> None:
        entry = entry_of(MemoryTable())
        order: list[int] = []

        async def take(number: int) -> None:
            async with entry.turn():
                order.append(number)
                await asyncio.sleep(0)
                order.append(number)

        await asyncio.gather(*(take(number) for number in range(3)))
        assert order == [0, 0, 1, 1, 2, 2]
        entry.begin_kill()
        with pytest.raises(SandboxGone, match="is killing"):
            await take(4)
        with pytest.raises(SandboxUnavailable, match="files only"):
            _ = entry.box

    asyncio.run(main())
