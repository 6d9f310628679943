"""What a server finds when it starts on the state folder of one that ended, perhaps killed in the middle of a move.

Owns: the decision for each box on record: go on, go back to where it rested, or go away. Invariant: afterwards every
box of the backend has a record at rest, and every record has a box or the snapshot that it is paused as.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.core.boxes import SandboxState
from tandem.core.errors import SandboxError, boundary
from tandem.sandbox.backend import Box, SandboxBackend
from tandem.sandbox.entry import Entry
from tandem.sandbox.lifecycle import AT_REST, ENDING
from tandem.sandbox.records import BoxRecord
from tandem.sandbox.snapshot import Snapshots
from tandem.sandbox.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Ids by what became of them; ``strays`` counts boxes that no record knew."""

    adopted: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)  # of those adopted: a move of theirs was taken back
    swept: list[str] = field(default_factory=list)  # their creation or their end was under way
    lost: list[str] = field(default_factory=list)  # they ended with the server
    strays: int = 0

    def summary(self) -> str:
        return (f"{len(self.adopted)} adopted, {len(self.undone)} undone, {len(self.swept)} swept, "
                f"{len(self.lost)} lost, {self.strays} strays")


async def recover(
    table: Table, backend: SandboxBackend, snapshots: Snapshots, enter: Callable[[BoxRecord, Box | None], Entry]
) -> Recovery:
    snapshots.load(table.snapshots())
    found = await backend.adopt()
    adopted: list[str] = []
    undone: list[str] = []
    swept: list[str] = []
    lost: list[str] = []
    for record in table.boxes():
        if record.state in ENDING or record.state is SandboxState.CREATING:
            table.remove(record.id)
            swept.append(record.id)
        elif record.saved and snapshots.has(record.saved):  # only its files count; a box of it was being ended or made
            _take(table, record, None, SandboxState.PAUSED, snapshots, enter)
            adopted.append(record.id)
            if record.state is not SandboxState.PAUSED:
                undone.append(record.id)
        elif (box := found.pop(record.handle, None)) is None or not await _calm(record, box):
            table.remove(record.id)
            lost.append(record.id)
        else:
            _take(table, record, box, rest_of(record), snapshots, enter)
            adopted.append(record.id)
            if record.state not in AT_REST:
                undone.append(record.id)
    for stray in found.values():
        await stray.kill()
    await snapshots.sweep()
    await snapshots.collect()
    return Recovery(adopted=adopted, undone=undone, swept=swept, lost=lost, strays=len(found))


def rest_of(record: BoxRecord) -> SandboxState:
    """Where a box rested before the move that its record speaks of."""
    match record.state:
        case SandboxState.PAUSING:
            return SandboxState.RUNNING
        case SandboxState.RESUMING:
            return SandboxState.PAUSED
        case SandboxState.SNAPSHOTTING | SandboxState.FORKING:
            return SandboxState(record.intent.rsplit(" ", 1)[-1])
        case state:
            return state


async def _calm(record: BoxRecord, box: Box) -> bool:
    """Bring the box to where its record rests; False: it is gone, or was ended because it cannot."""
    try:
        with boundary(SandboxError, f"sandbox {record.id}"):
            await (box.resume() if rest_of(record) is SandboxState.RUNNING else box.pause())
        return not box.gone.done()
    except SandboxError:
        await box.kill()
        return False


def _take(
    table: Table,
    record: BoxRecord,
    box: Box | None,
    state: SandboxState,
    snapshots: Snapshots,
    enter: Callable[[BoxRecord, Box | None], Entry],
) -> None:
    parent = record.parent if snapshots.has(record.parent) else ""
    if record.state is not state or record.parent != parent:
        record = msgspec.structs.replace(
            record, state=state, intent="", parent=parent, version=record.version + 1,
            deadline=record.deadline if state is SandboxState.RUNNING else None,
        )
        table.replace(record)
    enter(record, box)
    for each in {parent, record.saved} - {""}:
        snapshots.hold(each, record.id)
