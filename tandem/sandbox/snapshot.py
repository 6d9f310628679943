"""The tree of snapshots: moments of boxes' files, whose they are, and when nothing needs them any more.

Owns: which snapshots exist, their names and parents, who holds each (boxes made from it, snapshots in memory that
stand on it), and their end. Refuses: to lose a snapshot that someone holds. Invariants: a snapshot in memory is
released exactly once, after its last holder; a durable one is in the table only when all its blobs are in the store; a
blob is in the store as long as one snapshot names it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxError, SnapshotError, SnapshotMissing
from tandem.sandbox.backend import Frozen, Root
from tandem.sandbox.backends.merge import MERGE_AT
from tandem.sandbox.layers import LayerKeeper
from tandem.sandbox.leases import Leases, paths_of
from tandem.sandbox.records import SnapshotRecord, now
from tandem.sandbox.store import BlobStore
from tandem.sandbox.table import Table


class _Node:
    def __init__(self, record: SnapshotRecord, frozen: Frozen | None) -> None:
        self.record = record
        self.frozen = frozen
        self.holders: set[str] = set()


class Snapshots:
    """Without a store every snapshot ends with this process."""

    def __init__(
        self, table: Table, store: BlobStore | None = None, folder: Path | None = None, leases: Leases | None = None,
        *, most_layers: int = MERGE_AT,
    ) -> None:
        """``leases`` holds the images' layers that snapshots stand on; ``most_layers`` as for ``LayerKeeper``."""
        self._table = table
        self._leases = leases or Leases()
        self._keeper = (
            None if store is None or folder is None
            else LayerKeeper(store, folder, self._named, most_layers=most_layers)
        )
        self._nodes: dict[str, _Node] = {}
        self._held: dict[str, set[str]] = {}  # by holder
        self._prefix = secrets.token_hex(4)
        self._count = 0

    @property
    def can_keep(self) -> bool:
        return self._keeper is not None

    def kept(self, *, sandbox_id: str = "") -> list[SnapshotRecord]:
        """Those that users asked for, oldest first."""
        return [node.record for node in self._nodes.values()
                if node.record.kept and (not sandbox_id or node.record.sandbox_id == sandbox_id)]

    def find(self, name: str) -> SnapshotRecord:
        """By id, or the newest of this name. Raises SnapshotMissing."""
        node = self._nodes.get(name)
        if node is not None:
            return node.record
        for node in reversed(self._nodes.values()):
            if node.record.kept and name and node.record.name == name:
                return node.record
        raise SnapshotMissing(f"there is no snapshot {name!r}", hint="`tandem sandbox snapshot ls` lists them")

    def has(self, snapshot_id: str) -> bool:
        return snapshot_id in self._nodes

    async def add(
        self, frozen: Frozen, spec: SandboxSpec, *, sandbox_id: str, parent: str, name: str = "", durable: bool,
        kept: bool, holder: str = "",
    ) -> SnapshotRecord:
        """Take charge of what a backend froze; it is released when this fails. ``kept``: a user asked for it.

        Raises:
            SnapshotError: no store, a full disk. Nothing of it is left then.
        """
        self._count += 1
        record = SnapshotRecord(
            id=f"snap-{self._prefix}-{self._count}", name=name, parent=parent if parent in self._nodes else "",
            sandbox_id=sandbox_id, spec=spec, created_at=now(), live=frozen.live, kept=kept,
        )
        self._keep(record.id, [] if frozen.live else paths_of(frozen.root))
        if not durable:
            self._insert(record, frozen, holder)
            return record
        try:
            if self._keeper is None:
                raise SnapshotError("a durable snapshot needs a store", hint="give the manager a state folder")
            async with self._keeper.keeping(record, frozen) as record:
                if record.parent not in self._nodes:  # deleted meanwhile
                    record = msgspec.structs.replace(record, parent="")
                self._table.put_snapshot(record)
                self._insert(record, None, holder)
        except BaseException:
            self._leases.drop(record.id)
            raise
        finally:
            await frozen.release()
        return record

    async def alias(self, record: SnapshotRecord, *, sandbox_id: str, name: str) -> SnapshotRecord:
        """Another snapshot of the same durable files."""
        self._count += 1
        twin = msgspec.structs.replace(
            record, id=f"snap-{self._prefix}-{self._count}", name=name, parent=record.id, sandbox_id=sandbox_id,
            created_at=now(), kept=True,
        )
        self._table.put_snapshot(twin)
        self._insert(twin, None)
        return twin

    def load(self, records: Iterable[SnapshotRecord]) -> None:
        """What an earlier process kept."""
        for record in records:
            self._insert(record, None)

    async def root(self, snapshot_id: str) -> Root:
        """What boxes start from; hold it first. Raises SnapshotMissing, SnapshotCorrupt."""
        node = self._node(snapshot_id)
        if node.frozen is not None:
            return node.frozen.root
        assert self._keeper is not None
        return await self._keeper.root(node.record)

    async def processes(self, snapshot_id: str) -> Path:
        """The folder of a durable live snapshot; hold it first. Raises SnapshotError (in memory only), and as
        ``root``."""
        node = self._node(snapshot_id)
        if self._keeper is None or not node.record.durable:
            raise SnapshotError(f"snapshot {snapshot_id} has its processes in memory only", hint="take a durable one")
        return await self._keeper.processes(node.record)

    def hold(self, snapshot_id: str, holder: str) -> None:
        self._node(snapshot_id).holders.add(holder)
        self._held.setdefault(holder, set()).add(snapshot_id)

    async def drop(self, snapshot_id: str, holder: str) -> None:
        """Idempotent."""
        held = self._held.get(holder, set())
        held.discard(snapshot_id)
        if not held:
            self._held.pop(holder, None)
        node = self._nodes.get(snapshot_id)
        if node is not None:
            node.holders.discard(holder)
            await self._sweep(node)

    async def drop_all(self, holder: str) -> None:
        """It is dead."""
        for snapshot_id in list(self._held.get(holder, ())):
            await self.drop(snapshot_id, holder)

    async def delete(self, snapshot_id: str) -> bool:
        """The user needs it no more; boxes that stand on it go on. False: it was deleted already.

        Raises:
            SnapshotMissing: never heard of.
        """
        node = self._node(self.find(snapshot_id).id)
        was = node.record.kept
        self._change(node, kept=False)
        await self._sweep(node)
        return was

    async def collect(self) -> int:
        """Remove what no snapshot names from the store and the cache; the number of blobs removed. Only while no
        snapshot is being added."""
        if self._keeper is None:
            return 0
        return await self._keeper.collect()

    async def sweep(self) -> None:
        """Forget what nobody keeps or holds; for what an earlier process left."""
        for node in list(self._nodes.values()):
            await self._sweep(node)

    async def close(self) -> None:
        """Release all that is in memory; what is durable stays."""
        for node in list(self._nodes.values()):
            if node.frozen is not None:
                self._nodes.pop(node.record.id)
                await node.frozen.release()

    def _insert(self, record: SnapshotRecord, frozen: Frozen | None, holder: str = "") -> None:
        self._nodes[record.id] = _Node(record, frozen)
        if holder:
            self.hold(record.id, holder)
        if frozen is not None and record.parent:  # the layers of the one before may be under it
            self.hold(record.parent, record.id)
        self._keep(record.id, [Path(layer.external) for layer in record.layers if layer.external])

    def _keep(self, snapshot_id: str, paths: list[Path]) -> None:
        with contextlib.suppress(SandboxError):  # it is gone already: who starts a box of it is told
            self._leases.hold(snapshot_id, paths)

    def _node(self, snapshot_id: str) -> _Node:
        node = self._nodes.get(snapshot_id)
        if node is None:
            raise SnapshotMissing(f"there is no snapshot {snapshot_id!r}")
        return node

    async def _sweep(self, node: _Node) -> None:
        record = node.record
        if node.record.kept or node.holders or record.id not in self._nodes:
            return
        del self._nodes[record.id]
        self._leases.drop(record.id)
        for other in self._nodes.values():  # its children become children of what was before it
            if other.record.parent == record.id:
                self._change(other, parent=record.parent)
        if node.frozen is not None:
            await node.frozen.release()
        if record.durable:
            self._table.remove_snapshot(record.id)  # first: no record may name a blob that is gone
            if self._keeper is not None:
                await self._keeper.discard(record.blobs())
        if record.parent:
            await self.drop(record.parent, record.id)

    def _named(self) -> set[str]:
        return {blob for node in self._nodes.values() for blob in node.record.blobs()}

    def _change(self, node: _Node, **changes: object) -> None:
        record = msgspec.structs.replace(node.record, **changes)
        if record.durable:
            self._table.put_snapshot(record)
        node.record = record
