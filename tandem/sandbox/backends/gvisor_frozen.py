"""What is held of gVisor boxes at one moment: their files, or their processes with them.

Owns: what a durable one is made of. That of files is layers; that of processes is a folder with gVisor's images, a note
of ours and the files, but for layers that images brought, which it names.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

from tandem.core.errors import SnapshotError
from tandem.sandbox.backend import Layer, LayerKind, Root
from tandem.sandbox.backends.adoption import pack_root
from tandem.sandbox.backends.frozen import copy_layer, sync_file_system
from tandem.sandbox.backends.gvisor_root import Copies

NOTE = "tandem.json"  # beside the images: the number of the next call, and the root


class GvisorFrozen:
    """A checkpoint: processes and files. ``folder`` is ours until ``release``."""

    live = True

    def __init__(self, folder: Path, root: Root, copies: Copies) -> None:
        """``root`` is what it starts from; its first layer is ours."""
        self._folder = folder
        self._root = root
        self._copies = copies
        self._released = False

    @property
    def root(self) -> Root:
        """Raises SnapshotError: its files are not apart from its processes."""
        raise SnapshotError("a live snapshot has no files apart from its processes", hint="restore it, durable")

    async def save(self, folder: Path) -> Root:
        if self._released:
            raise SnapshotError("the snapshot was released before it was saved")
        await asyncio.to_thread(self._save, folder)
        return replace(self._root, layers=())

    def _save(self, folder: Path) -> None:
        """With all the files that are in folders; what images brought is named."""
        layers: list[Layer] = []
        for number, layer in enumerate(self._root.layers):
            if layer.kind is LayerKind.FOLDER:
                copy_layer(layer.path, folder / f"layer-{number}")
                layer = Layer(path=Path(f"layer-{number}"))
            layers.append(layer)
        for each in self._folder.iterdir():
            shutil.copyfile(each, folder / each.name)
        note = json.loads((self._folder / NOTE).read_text())
        note["root"] = pack_root(replace(self._root, layers=tuple(layers)))
        (folder / NOTE).write_text(json.dumps(note))
        sync_file_system(folder)

    async def release(self) -> None:
        if not self._released:
            self._released = True
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
            await self._copies.drop(self._root.layers[:1])


class GvisorFiles:
    """The files alone. Their copy is ours until ``release``, and as long as boxes stand on it."""

    live = False

    def __init__(self, root: Root, copies: Copies) -> None:
        self._root = root
        self._copies = copies
        self._released = False

    @property
    def root(self) -> Root:
        return self._root

    async def save(self, folder: Path) -> Root:
        """What was copied from boxes is copied again. Raises SnapshotError, OSError (a full disk)."""
        if self._released:
            raise SnapshotError("the snapshot was released before it was saved")
        layers: list[Layer] = []
        for number, layer in enumerate(self._root.layers):
            if self._copies.owns(layer):
                target = folder / f"layer-{number}"
                await asyncio.to_thread(copy_layer, layer.path, target)
                layer = Layer(path=target)
            layers.append(layer)
        return replace(self._root, layers=tuple(layers))

    async def release(self) -> None:
        if not self._released:
            self._released = True
            await self._copies.drop(self._root.layers)
