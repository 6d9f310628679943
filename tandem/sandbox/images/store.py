"""Where layers are kept: each once, under the digest of its uncompressed tar, as an index over it or as files.

Owns: the folder, its form on this machine (probed once), which layers are in use, and making room. A layer appears
whole or not at all. Layers in use are held by shared locks that die with their process, so a crash leaves nothing
pinned; eviction takes only what it can lock alone, the longest unused first.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.core.cache import make_folder
from tandem.core.errors import SandboxError, boundary
from tandem.sandbox.backend import Layer, LayerKind
from tandem.sandbox.images.erofs_mount import can_mount_index
from tandem.sandbox.images.erofs_writer import write_erofs
from tandem.sandbox.images.tar_reader import read_tar
from tandem.sandbox.images.tree import build_tree
from tandem.sandbox.images.unpack import unpack

UNPACKED = "-files"  # of a folder's name
UNSETTLED = "boot"  # names the boot in which a layer was written, until it is safe on disk
BOOT = Path("/proc/sys/kernel/random/boot_id")
FILLING = "filling"  # locked by the worker of a layer that is not whole
PLACE = re.compile(rf"[a-z0-9]+-[0-9a-f]{{64,}}({UNPACKED})?")  # a layer's folder
TAR, INDEX, FILES = "layer.tar", "index.erofs", "files"
WRITES_WAITING = 8


class Hold:
    """Layers that stay until ``release`` (idempotent) or the end of this process."""

    def __init__(self, layers: tuple[Layer, ...], descriptors: list[int]) -> None:
        self.layers = layers
        self._descriptors = descriptors

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class LayerStore:
    """The layers of one folder. Blocking; several threads and processes may use it at once."""

    def __init__(self, folder: Path, *, max_bytes: int = 50 * 2**30, indexed: bool | None = None) -> None:
        """``indexed`` None: as this machine can. Without an index, layers are unpacked."""
        self.folder = folder
        self.max_bytes = max_bytes
        self._layers = folder / "layers"
        self._layers.mkdir(parents=True, exist_ok=True)
        self.why_unpacked = can_mount_index(self._layers) if indexed is None else "" if indexed else "asked for"

    @property
    def kind(self) -> LayerKind:
        return LayerKind.FOLDER if self.why_unpacked else LayerKind.EROFS_TAR

    def find(self, digest: str) -> Layer | None:
        """A layer that is here, marked as used now."""
        folder = self._place(digest)
        if not folder.is_dir() or self._lost(folder):
            return None
        with suppress(OSError):
            os.utime(folder)
        if self.kind is LayerKind.FOLDER:
            return Layer(kind=LayerKind.FOLDER, path=folder / FILES, digest=digest)
        return Layer(kind=LayerKind.EROFS_TAR, path=folder / INDEX, device=folder / TAR, digest=digest)

    def add(self, digest: str, pieces: Iterable[bytes]) -> Layer:
        """Keep a layer whose plain tar comes in pieces; '' takes any content (a tar we made ourselves). Asked for
        the same layer twice at once, one is written and the other waits.

        Raises:
            SandboxError: the content is not what the digest says, or no room.
        """
        if not digest:
            return self._add_unnamed(pieces)
        what = f"layer {digest}"
        with boundary(SandboxError, f"{what} cannot be kept in {self.folder}", hint="is the disk full?"):
            make_folder(self._place(digest), lambda scratch: self._fill(scratch, digest, pieces))
        layer = self.find(digest)
        if layer is None:
            raise SandboxError(f"{what} went while it was being kept")
        if layer.kind is LayerKind.EROFS_TAR:  # unpacked files are too many to sync: they last for this boot
            threading.Thread(target=_settle, args=(self._place(digest),), daemon=True, name="layer-settle").start()
        return layer

    def _lost(self, folder: Path) -> bool:
        """Whether a layer may hold anything, and is removed: the machine went down before it was safe on disk, or it
        was to fill while it is read and its worker is gone."""
        with suppress(FileNotFoundError), (folder / FILLING).open("rb") as marker, suppress(BlockingIOError):
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / FILLING).exists():
                return self._remove(folder)
        with suppress(FileNotFoundError):
            if (folder / UNSETTLED).read_text() != _boot_id():
                return self._remove(folder)
        return False

    def add_file(self, tar: Path) -> Layer:
        """Keep a layer that is a plain tar on this machine, under the digest that it has."""
        with tar.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        return self.find(digest) or self.add(digest, _pieces(tar))

    def add_lazy(self, digest: str, size: int, index: bytes, start: Callable[[Path], None]) -> Layer:
        """Keep a layer whose tar fills while it is read. ``start`` gets the layer's folder, in which tar, index and
        the marker ``FILLING`` are, and returns when the tar may be read; the marker goes when it is whole."""
        if self.kind is not LayerKind.EROFS_TAR:
            raise SandboxError(f"layers are unpacked here ({self.why_unpacked}), so none is lazy")
        folder = self._place(digest)

        def fill(scratch: Path) -> None:
            with (scratch / TAR).open("wb") as tar:
                tar.truncate(size)
            (scratch / INDEX).write_bytes(index)
            (scratch / FILLING).touch()
            (scratch / UNSETTLED).write_text(_boot_id())
            start(scratch)

        with boundary(SandboxError, f"layer {digest} cannot be kept in {self.folder}", hint="is the disk full?"):
            make_folder(folder, fill)
        return Layer(kind=LayerKind.EROFS_TAR, path=folder / INDEX, device=folder / TAR, digest=digest)

    @contextmanager
    def using(self, digests: Sequence[str]) -> Iterator[tuple[Layer, ...]]:
        """Hold layers: none of them is evicted inside.

        Raises:
            SandboxError: one is not here.
        """
        hold = self.hold(digests)
        try:
            yield hold.layers
        finally:
            hold.release()

    def hold(self, digests: Sequence[str]) -> Hold:
        """As ``using``, for who lets go elsewhere."""
        descriptors: list[int] = []
        layers: list[Layer] = []
        try:
            for digest in digests:
                descriptors.append(lock_layer(self._place(digest)))
                found = self.find(digest)
                assert found is not None
                layers.append(found)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return Hold(tuple(layers), descriptors)

    def evict(self, *, keep: Iterable[str] = (), max_bytes: int | None = None) -> list[str]:
        """Make the store as small as ``max_bytes`` (None: its own bound), if what is in use or in ``keep`` lets it;
        the digests of what went."""
        bound = self.max_bytes if max_bytes is None else max_bytes
        kept = {self._place(digest).name for digest in keep}
        total = 0
        found = []
        for folder in self._folders():
            with suppress(FileNotFoundError):
                found.append((folder.stat().st_mtime, _size(folder), folder))
                total += found[-1][1]
        gone = []
        for _, size, folder in sorted(found):
            if total <= bound:
                break
            if folder.name not in kept and self._remove(folder):
                total -= size
                gone.append(folder.name.removesuffix(UNPACKED).replace("-", ":", 1))
        return gone

    def total(self) -> int:
        """Bytes on disk of all layers."""
        return sum(_size(folder) for folder in self._folders())

    def _folders(self) -> list[Path]:
        return [folder for folder in self._layers.iterdir() if not folder.name.startswith(".") and folder.is_dir()]

    def remove(self, digest: str) -> bool:
        """Whether a layer went; one in use stays."""
        return self._remove(self._place(digest))

    def remove_all(self, digests: Sequence[str]) -> bool:
        """Whether they went: all of them, or none as one is in use. Those that are not here are no hindrance."""
        with self._alone(digests) as alone:
            for digest in digests if alone else ():
                self._move_away(self._place(digest))
            return alone

    def in_use(self, digests: Sequence[str]) -> bool:
        """Whether anybody holds one of them."""
        with self._alone(digests) as alone:
            return not alone

    @contextmanager
    def _alone(self, digests: Sequence[str]) -> Iterator[bool]:
        """Whether nobody else holds them; then nobody can inside."""
        locks: list[int] = []
        try:
            try:
                for digest in digests:
                    with suppress(FileNotFoundError):
                        locks.append(os.open(self._place(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                        fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            yield alone
        finally:
            for lock in locks:
                os.close(lock)

    def size(self, digest: str) -> int:
        """Bytes on disk."""
        return _size(self._place(digest))

    def _place(self, digest: str) -> Path:
        algorithm, _, name = digest.partition(":")
        if not name.isalnum() or not algorithm.isalnum():
            raise SandboxError(f"{digest!r} is no digest")
        return self._layers / f"{algorithm}-{name}{'' if self.kind is LayerKind.EROFS_TAR else UNPACKED}"

    def _add_unnamed(self, pieces: Iterable[bytes]) -> Layer:
        with boundary(SandboxError, f"no room for a layer in {self.folder}", hint="is the disk full?"):
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=self._layers))
            try:
                digest = _receive(scratch / TAR, pieces)
                return self.add(digest, _pieces(scratch / TAR))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _fill(self, scratch: Path, digest: str, pieces: Iterable[bytes]) -> None:
        (scratch / UNSETTLED).write_text(_boot_id())
        found = _receive(scratch / TAR, pieces, algorithm=digest.partition(":")[0])
        if found != digest:
            raise SandboxError(f"layer {digest} is not what its digest names (its content has {found})")
        with (scratch / TAR).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        tree = build_tree(read_tar(data, name=f"layer {digest}"), name=f"layer {digest}")
        if self.kind is LayerKind.EROFS_TAR:
            (scratch / INDEX).write_bytes(write_erofs(tree.root, device_bytes=max(size, 1024)))
        else:
            unpack(tree.root, data, scratch / FILES)
            (scratch / TAR).unlink()

    def _remove(self, folder: Path) -> bool:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._move_away(folder)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)

    def _move_away(self, folder: Path) -> bool:
        """Of a folder that is locked; whether it was there."""
        doomed = Path(tempfile.mkdtemp(prefix=".old-", dir=self._layers))
        try:
            folder.rename(doomed / "layer")
            return True
        except FileNotFoundError:
            return False
        finally:
            shutil.rmtree(doomed, ignore_errors=True)


def place_of(path: Path) -> Path | None:
    """The folder of the layer that a file or folder is part of; None: it is of no layer of a store."""
    return path.parent if PLACE.fullmatch(path.parent.name) else None


def lock_layer(folder: Path) -> int:
    """A descriptor that holds a layer until it is closed.

    Raises:
        SandboxError: it is not here.
    """
    while True:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            digest = folder.name.removesuffix(UNPACKED).replace("-", ":", 1)
            raise SandboxError(f"layer {digest} is not here any more", hint="pull or build the image again") from error
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # evicted between the two; perhaps it came back


def _receive(target: Path, pieces: Iterable[bytes], *, algorithm: str = "sha256") -> str:
    """Write a stream and compute its digest, beside whoever makes the pieces: both leave the interpreter free."""
    hasher = hashlib.new(algorithm)
    with target.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "layer-write") as pool:

        def take(piece: bytes) -> None:
            hasher.update(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]

        waiting: deque[Future[None]] = deque()
        for piece in pieces:
            waiting.append(pool.submit(take, piece))
            if len(waiting) > WRITES_WAITING:
                waiting.popleft().result()
        for job in waiting:
            job.result()
    return f"{algorithm}:{hasher.hexdigest()}"


def _settle(folder: Path) -> None:
    """Bring a layer safely to disk, after it is in use already: nobody waits for this."""
    with suppress(OSError):
        for name in (TAR, INDEX):
            descriptor = os.open(folder / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        (folder / UNSETTLED).unlink()


def _boot_id() -> str:
    with suppress(OSError):
        return BOOT.read_text().strip()
    return ""


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
