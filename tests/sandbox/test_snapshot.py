from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from folderbox import FolderFrozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from tandem.core.wire import digest
from tandem.sandbox.backend import Layer, LayerKind, Root
from tandem.sandbox.records import SnapshotRecord
from tandem.sandbox.snapshot import Snapshots
from tandem.sandbox.store import BlobStore
from tandem.sandbox.table import MemoryTable, SqliteTable

SPEC = SandboxSpec()


class Place:
    """A snapshot tree on a real table and store, and what was frozen for it."""

    def __init__(self, folder: Path, *, store: str = "") -> None:
        self.folder = self.boxes = folder
        self.table = SqliteTable(folder / "state")
        self.store = BlobStore(store or str(folder / "blobs"))
        self.tree = Snapshots(self.table, self.store, folder / "state")
        self.released: list[Path] = []
        self.count = 0

    def frozen(self, text: str) -> FolderFrozen:
        self.count += 1
        layer = self.boxes / f"frozen-{self.count}"
        layer.mkdir()
        (layer / "file").write_text(text)
        os.utime(layer / "file", (0, 0))
        os.utime(layer, (0, 0))
        return FolderFrozen(layer, self.released, live=False)

    async def add(self, text: str, *, durable: bool = True, parent: str = "", kept: bool = True,
                  holder: str = "", name: str = "") -> SnapshotRecord:
        return await self.tree.add(self.frozen(text), SPEC, sandbox_id="sbx", parent=parent, durable=durable,
                                   kept=kept, holder=holder, name=name)

    async def text(self, snapshot_id: str) -> str:
        root = await self.tree.root(snapshot_id)
        return (root.layers[0].path / "file").read_text()

    def again(self) -> Place:
        """As a later process finds it."""
        self.table.close()
        place = Place(self.folder, store=self.store.place)
        place.tree.load(place.table.snapshots())
        return place


def run(
    folder: Path, test: Callable[[Place], Awaitable[None]], *, store: str = "", boxes: Path | None = None
) -> None:
    async def main() -> None:
        place = Place(folder, store=store)
        place.boxes = boxes or folder
        await test(place)
        place.table.close()

    asyncio.run(main())


@pytest.mark.parametrize("remote", [False, True])
def test_a_durable_snapshot_outlives_process_and_cache(tmp_path: Path, remote: bool) -> None:
    async def test(place: Place) -> None:
        one, two = await place.add("one", name="base"), await place.add("two", name="base")
        assert len(place.released) == 2 and one.durable
        assert place.tree.find("base").id == two.id and place.tree.find(one.id) == one
        assert [record.id for record in place.tree.kept()] == [one.id, two.id]
        assert not list((tmp_path / "state/scratch").iterdir())
        later = place.again()
        assert await later.text(one.id) == "one"
        subprocess.run(["rm", "-r", str(tmp_path / "state/layers")], check=True)
        later = later.again()
        assert await later.text(two.id) == "two"
        await later.tree.delete("base")
        assert later.tree.find("base").id == one.id
        assert await later.tree.delete(one.id) and later.store.names() == set()
        assert not [path for path in (tmp_path / "state/layers").iterdir() if path.name != ".boot"]
        with pytest.raises(SnapshotMissing, match="'base'"):
            later.tree.find("base")
        later.table.close()

    run(tmp_path, test, store=f"memory:/{tmp_path}" if remote else "")


def test_the_same_content_is_kept_once_until_the_last_that_names_it(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        same = await asyncio.gather(*(place.add("same") for _ in range(4)))
        assert len(place.store.names()) == 1
        adding = asyncio.gather(*(place.tree.delete(each.id) for each in same), place.add("same"))
        *deleted, last = await adding  # deleted while it is put again
        assert all(deleted) and len(place.store.names()) == 1 and await place.text(last.id) == "same"

    run(tmp_path, test)


def test_a_corrupt_blob_is_named_and_a_missing_one_too(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        bad, gone = await place.add("bad"), await place.add("gone")
        subprocess.run(["rm", "-r", str(tmp_path / "state/layers")], check=True)
        later = place.again()
        blob = bad.layers[0].blob
        path = tmp_path / "blobs" / blob[:2] / blob
        path.write_bytes(path.read_bytes().replace(b"bad", b"BAD"))
        with pytest.raises(SnapshotCorrupt, match=blob):
            await later.text(bad.id)
        later.store.delete(gone.layers[0].blob)
        with pytest.raises(SnapshotMissing, match=gone.layers[0].blob):
            await later.text(gone.id)
        assert [each.name for each in (tmp_path / "state/layers").iterdir()] == [".boot"]
        assert not list((tmp_path / "state/scratch").iterdir())
        later.table.close()

    run(tmp_path, test)


def test_what_a_killed_process_left_half_done_is_collected(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        kept = await place.add("kept")
        stray = tmp_path / "blobs/ab"
        stray.mkdir()
        (stray / digest(b"x")).write_bytes(b"x")
        (stray / f"{digest(b'y')}.new").write_bytes(b"y")
        (stray / "notes.txt").write_text("of someone else")
        os.rename(stray, tmp_path / "blobs" / digest(b"x")[:2])
        (tmp_path / "state/scratch/half").mkdir()
        later = place.again()
        await later.tree.collect()
        names = later.store.names()
        assert kept.layers[0].blob in names and digest(b"x") not in names and "notes.txt" in names
        assert not list((tmp_path / "state/scratch").iterdir())
        later.table.close()

    run(tmp_path, test)


def test_a_full_disk_leaves_no_snapshot(tmp_path: Path, small_disk: Path) -> None:
    async def test(place: Place) -> None:
        with pytest.raises(SnapshotError, match="the disk is full") as caught:
            await place.add("x" * 2_000_000)
        assert "make room" in caught.value.hint
        assert place.store.names() == set() and place.tree.kept() == [] and place.table.snapshots() == []
        assert not list((small_disk / "state/scratch").iterdir()) and len(place.released) == 1
        fits = await place.add("small")
        assert await place.text(fits.id) == "small"

    run(small_disk, test, boxes=tmp_path)


def test_layers_that_someone_else_keeps_are_named_when_they_are_gone(tmp_path: Path) -> None:
    async def test(place: Place) -> None:
        image = tmp_path / "image"
        image.mkdir()
        frozen = place.frozen("x")
        frozen.save = _save_with(frozen, image)  # type: ignore[method-assign]
        record = await place.tree.add(frozen, SPEC, sandbox_id="", parent="", durable=True, kept=True)
        root = await place.tree.root(record.id)
        assert [layer.path == image for layer in root.layers] == [False, True]
        assert root.layers[0].kind is LayerKind.FOLDER and root.layers[0].digest in place.store.names()
        image.rmdir()
        with pytest.raises(SnapshotMissing, match="image"):
            await place.tree.root(record.id)

    def _save_with(frozen: FolderFrozen, image: Path) -> Callable[[Path], Awaitable[Root]]:
        before = frozen.save

        async def save(folder: Path) -> Root:
            root = await before(folder)
            return dataclasses.replace(root, layers=(*root.layers, Layer(path=image)))

        return save

    run(tmp_path, test)


class Tree(RuleBasedStateMachine):
    """Snapshots, boxes on them, deletions in any order: nothing that is needed is lost, nothing else is left."""

    snapshots, boxes = Bundle("snapshots"), Bundle("boxes")

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.place = self.loop.run_until_complete(self._make())
        self.texts: dict[str, str] = {}
        self.kept: set[str] = set()
        self.held: dict[str, str] = {}  # by box
        self.count = 0

    async def _make(self) -> Place:
        return Place(Path(self.scratch.name))

    def teardown(self) -> None:
        for box, snapshot_id in list(self.held.items()):
            self.do(self.place.tree.drop(snapshot_id, box))
        for snapshot_id in list(self.kept):
            self.do(self.place.tree.delete(snapshot_id))
        assert self.place.store.names() == set() and not self.place.tree._nodes
        assert len(self.place.released) == self.place.count
        self.place.table.close()
        self.loop.close()
        self.scratch.cleanup()

    def do(self, work: Awaitable[object]) -> object:
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    @rule(target=snapshots, text=st.sampled_from("abc"), durable=st.booleans())
    def first(self, text: str, durable: bool) -> str:
        return self._added(text, durable, "")

    @rule(target=snapshots, text=st.sampled_from("abc"), durable=st.booleans(), parent=snapshots)
    def after(self, text: str, durable: bool, parent: str) -> str:
        return self._added(text, durable, parent)

    @rule(target=boxes, snapshot=snapshots)
    def start(self, snapshot: str) -> str:
        self.count += 1
        box = f"box-{self.count}"
        if self.place.tree.has(snapshot):
            self.place.tree.hold(snapshot, box)
            self.held[box] = snapshot
        return box

    @rule(box=consumes(boxes))
    def end(self, box: str) -> None:
        self.held.pop(box, None)
        self.do(self.place.tree.drop_all(box))

    @rule(snapshot=snapshots)
    def delete(self, snapshot: str) -> None:
        if not self.place.tree.has(snapshot):
            with pytest.raises(SnapshotMissing):
                self.do(self.place.tree.delete(snapshot))
            return
        assert self.do(self.place.tree.delete(snapshot)) == (snapshot in self.kept)
        self.kept.discard(snapshot)

    @invariant()
    def what_is_needed_is_there_and_nothing_else(self) -> None:
        tree = self.place.tree
        for snapshot in self.kept | set(self.held.values()):
            assert self.do(self.place.text(snapshot)) == self.texts[snapshot]
        durable = {record.id for record in self.place.table.snapshots()}
        assert durable == {each for each, node in tree._nodes.items() if node.record.durable}
        named = {blob for record in self.place.table.snapshots() for blob in record.blobs()}
        assert self.place.store.names() == named
        for each, node in tree._nodes.items():
            assert each in self.kept or node.holders
            assert not node.record.parent or tree.has(node.record.parent)

    def _added(self, text: str, durable: bool, parent: str) -> str:
        record = self.do(self.place.add(text, durable=durable, parent=parent))
        assert isinstance(record, SnapshotRecord)
        self.texts[record.id] = text
        self.kept.add(record.id)
        return record.id


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_without_a_store_everything_is_in_memory(tmp_path: Path) -> None:
    async def main() -> None:
        tree, released = Snapshots(MemoryTable()), list[Path]()
        folder = tmp_path / "one"
        folder.mkdir()
        record = await tree.add(FolderFrozen(folder, released, live=False), SPEC, sandbox_id="", parent="",
                                durable=False, kept=True)
        assert not tree.can_keep and (await tree.root(record.id)).layers[0].path == folder
        with pytest.raises(SnapshotError, match="memory only"):
            await tree.processes(record.id)
        await tree.close()
        assert released == [folder]

    asyncio.run(main())
