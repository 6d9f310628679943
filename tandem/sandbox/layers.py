"""Layers of snapshots between a backend and the store: packed to blobs, and made into something to mount again.

Owns: the folder of layers made ready (a cache: all of it can be made again from the store), scratch space, which
blobs are in use by a snapshot that is not in the table yet, and that no snapshot stands on a long chain of layers of
its own: beyond the bound they are kept as one. Invariants: a blob that a snapshot names or is about to name is never
deleted; a layer in the cache is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tandem.core.errors import SnapshotMissing
from tandem.sandbox.archive import pack, unpack
from tandem.sandbox.backend import Frozen, Layer, LayerKind, Root
from tandem.sandbox.backends.merge import MERGE_AT, merge_layers
from tandem.sandbox.records import SnapshotRecord, StoredLayer
from tandem.sandbox.store import BlobStore, file_digest, storage_error

BLOB = re.compile(r"[0-9a-f]{64}(\.new)?")
MOST_REMEMBERED = 1000  # chains that were merged: whose result is known
BOOT = Path("/proc/sys/kernel/random/boot_id")


class LayerKeeper:
    """``named`` tells which blobs snapshots name now."""

    def __init__(
        self, store: BlobStore, folder: Path, named: Callable[[], set[str]], *, most_layers: int = MERGE_AT
    ) -> None:
        """``most_layers`` of its own has a snapshot; what its image brought is not counted."""
        self._store = store
        self._place = folder
        self._most_layers = most_layers
        self._merged: dict[tuple[str, ...], str] = {}
        self._ready, self._scratch = folder / "layers", folder / "scratch"
        self._named = named
        self._reserved: Counter[str] = Counter()
        self._deleting = asyncio.Lock()
        self._busy: dict[str, tuple[asyncio.Lock, int]] = {}
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a killed process
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._forget_after_a_crash()

    @contextlib.asynccontextmanager
    async def keeping(self, record: SnapshotRecord, frozen: Frozen) -> AsyncIterator[SnapshotRecord]:
        """Put all that a snapshot is made of into the store; inside, its blobs stay although no table names them.
        What fails in here or inside takes them away again.

        Raises:
            SnapshotError: a full disk, a store that cannot be reached.
        """
        mine: list[str] = []
        scratch = self._scratch / record.id
        try:
            try:
                scratch.mkdir()
                root = await frozen.save(scratch)
                if frozen.live:
                    blob, num_bytes = await self._put_folder(scratch, mine)
                    layers = (StoredLayer(kind="live", blob=blob, num_bytes=num_bytes),)
                else:
                    chain = await self._shortened(root.layers, scratch, mine)
                    layers = tuple([await self._put(layer, scratch, mine) for layer in chain])
            except OSError as error:
                raise storage_error(f"snapshot {record.id} cannot be written", error) from error
            finally:
                await asyncio.to_thread(shutil.rmtree, scratch, True)
            yield msgspec.structs.replace(
                record, durable=True, layers=layers, host_base=root.host_base, environment=dict(root.environment),
                user=root.user, folder=root.folder,
            )
        finally:
            self._reserved.subtract(mine)
            self._reserved = +self._reserved
            await self.discard(mine)  # only what nothing names by now

    async def root(self, record: SnapshotRecord) -> Root:
        """What boxes start from. Raises SnapshotMissing, SnapshotCorrupt."""
        return Root(
            layers=tuple([await self._layer(stored) for stored in record.layers]), host_base=record.host_base,
            environment=record.environment, user=record.user, folder=record.folder,
        )

    async def processes(self, record: SnapshotRecord) -> Path:
        """The folder of a live snapshot, for the backend's ``restore``."""
        return await self._folder(record.layers[0].blob)

    async def discard(self, blobs: Iterable[str]) -> int:
        """Delete those of the blobs that nothing names; how many that were."""
        count = 0
        async with self._deleting:
            for blob in set(blobs) - self._named() - set(self._reserved):
                await asyncio.to_thread(self._delete, blob)
                count += 1
        return count

    async def collect(self) -> int:
        """``discard`` of everything there is; for what killed processes left."""
        found = {path.name for path in self._ready.iterdir()} | await asyncio.to_thread(self._store.names)
        return await self.discard(name for name in found if BLOB.fullmatch(name))

    async def _shortened(self, layers: Sequence[Layer], scratch: Path, mine: list[str]) -> Sequence[Layer]:
        """The same files in no more layers than the bound. Those that are stored already become one first: the next
        snapshot on them finds that one; only if this is not enough, all do."""
        count = next((at for at, layer in enumerate(layers) if not self._is_own(layer, scratch)), len(layers))
        if count <= self._most_layers:
            return layers
        own, below = list(layers[:count]), layers[count:]
        fresh = next((at for at, layer in enumerate(own) if self._blob_of(layer.path)), count)
        stored = [self._blob_of(layer.path) for layer in own[fresh:]]
        await self._reserve(stored, mine)  # none of them goes while it is read
        if len(stored) > 1:
            own[fresh:] = [await self._one_of_stored(stored, mine)]
        if len(own) > self._most_layers:
            own = [await self._one_of([layer.path for layer in own], scratch / "merged")]
        return [*own, *below]

    def _is_own(self, layer: Layer, scratch: Path) -> bool:
        return layer.kind is LayerKind.FOLDER and (
            layer.path.is_relative_to(scratch) or layer.path.is_relative_to(self._ready)
        )

    async def _one_of_stored(self, blobs: list[str], mine: list[str]) -> Layer:
        if known := self._merged.get(tuple(blobs)):
            await self._reserve([known], mine)
            if (self._ready / known).exists() and await asyncio.to_thread(self._store.has, known):
                return Layer(path=self._ready / known)
        folders = [await self._folder(blob) for blob in blobs]
        made = await self._one_of(folders, self._scratch / f"merged-{secrets.token_hex(8)}")
        try:
            blob, _ = await self._put_folder(made.path, mine)
        finally:
            await asyncio.to_thread(shutil.rmtree, made.path, True)
        if len(self._merged) >= MOST_REMEMBERED:
            self._merged.clear()
        self._merged[tuple(blobs)] = blob
        return Layer(path=await self._folder(blob))

    async def _one_of(self, folders: list[Path], target: Path) -> Layer:
        """Hard links: nothing is copied."""
        place = self._place
        names = [str(folder.relative_to(place)) for folder in folders]
        device = place.stat().st_dev
        await asyncio.to_thread(merge_layers, str(place), names, str(target.relative_to(place)), device=device)
        return Layer(path=target)

    async def _put(self, layer: Layer, scratch: Path, mine: list[str]) -> StoredLayer:
        blob = self._blob_of(layer.path)
        if blob:
            device = self._blob_of(layer.device) if layer.device else ""
            await self._reserve([each for each in (blob, device) if each], mine)
            return StoredLayer(kind=layer.kind.value, blob=blob, device=device)
        if not layer.path.is_relative_to(scratch):
            return StoredLayer(
                kind=layer.kind.value, external=str(layer.path), external_device=str(layer.device or "")
            )
        if layer.kind is LayerKind.FOLDER:
            blob, num_bytes = await self._put_folder(layer.path, mine)
            return StoredLayer(kind=layer.kind.value, blob=blob, num_bytes=num_bytes)
        num_bytes = layer.path.stat().st_size
        blob = await self._put_file(layer.path, mine)
        device, external = "", ""
        if layer.device is not None:
            device = self._blob_of(layer.device)
            if device:
                await self._reserve([device], mine)
            elif layer.device.is_relative_to(scratch):
                num_bytes += layer.device.stat().st_size
                device = await self._put_file(layer.device, mine)
            else:
                external = str(layer.device)
        return StoredLayer(
            kind=layer.kind.value, blob=blob, device=device, num_bytes=num_bytes, external_device=external
        )

    async def _put_folder(self, folder: Path, mine: list[str]) -> tuple[str, int]:
        archive = self._scratch / f"{folder.parent.name}-{folder.name}.tar"
        try:
            await asyncio.to_thread(pack, folder, archive)
            num_bytes = archive.stat().st_size
            blob = await self._put_file(archive, mine)
        finally:
            archive.unlink(missing_ok=True)
        ready = self._ready / blob
        if not ready.exists():
            with contextlib.suppress(OSError):  # another file system, or someone was faster: made again when wanted
                os.rename(folder, ready)
        return blob, num_bytes

    async def _put_file(self, path: Path, mine: list[str]) -> str:
        blob = await asyncio.to_thread(file_digest, path)
        await self._reserve([blob], mine)
        async with self._alone(blob):
            await asyncio.to_thread(self._store.put, path, blob)
        return blob

    @contextlib.asynccontextmanager
    async def _alone(self, blob: str) -> AsyncIterator[None]:
        """One at a time for each blob."""
        lock, num_users = self._busy.get(blob, (asyncio.Lock(), 0))
        self._busy[blob] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._busy.pop(blob)
            if num_users > 1:
                self._busy[blob] = (lock, num_users - 1)

    async def _reserve(self, blobs: list[str], mine: list[str]) -> None:
        async with self._deleting:
            self._reserved.update(blobs)
            mine.extend(blobs)

    def _blob_of(self, path: Path) -> str:
        """The blob that a path is made from; '' when it is not one of ours."""
        if path.is_relative_to(self._ready):
            return path.relative_to(self._ready).parts[0]
        if self._store.local and path.is_relative_to(self._store.place.removeprefix("file://")):
            return path.name
        return ""

    async def _layer(self, stored: StoredLayer) -> Layer:
        kind = LayerKind(stored.kind)
        if stored.external:
            path = _external(stored.external)
        elif kind is LayerKind.FOLDER:
            path = await self._folder(stored.blob)
        else:
            path = await self._file(stored.blob)
        device = None
        if stored.device:
            device = await self._file(stored.device)
        elif stored.external_device:
            device = _external(stored.external_device)
        return Layer(kind=kind, path=path, device=device, digest=stored.blob)

    async def _folder(self, blob: str) -> Path:
        ready = self._ready / blob
        async with self._alone(blob):
            if not ready.exists():
                await asyncio.to_thread(self._unpack, blob, ready)
        return ready

    async def _file(self, blob: str) -> Path:
        path = await asyncio.to_thread(self._store.path, blob)
        if path is not None:
            return path
        ready = self._ready / blob
        async with self._alone(blob):
            if not ready.exists():
                scratch = self._scratch / blob
                await asyncio.to_thread(self._store.fetch, blob, scratch)
                os.rename(scratch, ready)
        return ready

    def _unpack(self, blob: str, ready: Path) -> None:
        archive, folder = self._scratch / f"{blob}.tar", self._scratch / blob
        try:
            source = self._store.path(blob)
            if source is None:
                self._store.fetch(blob, archive)
            try:
                unpack(source or archive, folder)
                os.rename(folder, ready)
            except OSError as error:
                raise storage_error(f"layer {blob} cannot be unpacked", error) from error
        finally:
            archive.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def _delete(self, blob: str) -> None:
        self._store.delete(blob)
        ready = self._ready / blob
        if ready.is_dir():
            shutil.rmtree(ready, ignore_errors=True)
        else:
            ready.unlink(missing_ok=True)

    def _forget_after_a_crash(self) -> None:
        """The cache is not synced: after the machine itself went down nobody knows what of it is on the disk."""
        boot = BOOT.read_text() if BOOT.exists() else ""
        marker = self._ready / ".boot"
        if not marker.exists() or marker.read_text() != boot:
            shutil.rmtree(self._ready, ignore_errors=True)
            self._ready.mkdir(parents=True)
            marker.write_text(boot)


def _external(place: str) -> Path:
    path = Path(place)
    if not path.exists():
        raise SnapshotMissing(f"layer {place} of the snapshot is gone", hint="pull or build its image again")
    return path
