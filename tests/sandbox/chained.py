"""Snapshots that stand on each other, as a box's do that is paused and resumed again and again; run as a script, it
adds to such a chain until it is killed, and prints the id and the content of each snapshot that is safe."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backend import Layer, Root
from tandem.sandbox.images.view import View
from tandem.sandbox.records import SnapshotRecord
from tandem.sandbox.snapshot import Snapshots
from tandem.sandbox.store import BlobStore
from tandem.sandbox.table import SqliteTable

MOST_LAYERS = 3


class Chained:
    """A box's new files (``upper``) over what it started from."""

    live = False

    def __init__(self, upper: Path, below: Root) -> None:
        self._upper = upper
        self.root = Root(layers=(Layer(path=upper), *below.layers), host_base=False)

    async def save(self, folder: Path) -> Root:
        shutil.copytree(self._upper, folder / "layer-0", symlinks=True, copy_function=_copy)
        return Root(layers=(Layer(path=folder / "layer-0"), *self.root.layers[1:]), host_base=False)

    async def release(self) -> None:
        shutil.rmtree(self._upper, ignore_errors=True)


def _copy(source: str, target: str) -> None:
    if os.path.isfile(source):
        shutil.copy2(source, target)
    else:
        os.mknod(target, 0o020000, 0)


class Chain:
    """Durable snapshots in ``folder``; ``contents`` says what must be in each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = SqliteTable(folder / "state")
        self.store = BlobStore(str(folder / "blobs"))
        self.tree = Snapshots(self.table, self.store, folder / "state", most_layers=MOST_LAYERS)
        self.tree.load(self.table.snapshots())
        self.count = 0

    async def add(self, parent: str, changes: Mapping[str, str | None]) -> SnapshotRecord:
        """``changes``: new contents by path, None for one that is removed."""
        below = await self.tree.root(parent) if parent else Root(host_base=False)
        self.count += 1
        upper = self.folder / f"upper-{os.getpid()}-{self.count}"
        upper.mkdir()
        for path, text in changes.items():
            place = upper / path
            place.parent.mkdir(exist_ok=True)
            if text is None:
                os.mknod(place, 0o020000, 0)  # as overlayfs hides what is below
            else:
                place.write_text(text)
        return await self.tree.add(
            Chained(upper, below), SandboxSpec(), sandbox_id="box", parent=parent, durable=True, kept=True
        )

    async def content(self, snapshot_id: str) -> dict[str, str]:
        root = await self.tree.root(snapshot_id)
        with View(root.layers, host_base=False) as view:
            found = {}
            for folder in ("", *view.names("")):
                place = view.find(folder) if folder else None
                for name in view.names(folder) if not folder or (place and place.is_folder) else ():
                    path = f"{folder}/{name}" if folder else name
                    if (one := view.find(path)) is not None and not one.is_folder:
                        found[path] = view.read(one).decode()
            return found


async def main(folder: Path) -> None:
    chain = Chain(folder)
    await chain.tree.collect()
    dice = random.Random(os.urandom(8))
    records = chain.tree.kept()
    parent = records[-1].id if records else ""
    content = await chain.content(parent) if parent else {}
    while True:
        changes: dict[str, str | None] = {}
        for _ in range(dice.randint(1, 4)):
            path = dice.choice(("a", "b", "d/a", "d/b", "e/a"))
            changes[path] = None if dice.random() < 0.3 else str(dice.random())
        record = await chain.add(parent, changes)
        content = {path: text for path, text in {**content, **changes}.items() if text is not None}
        parent = record.id
        print(json.dumps([parent, content]), flush=True)
        old = chain.tree.kept()
        if len(old) > 5:
            gone = dice.choice(old[:-1]).id
            print(json.dumps([gone, None]), flush=True)  # it may be gone from here on
            await chain.tree.delete(gone)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
