"""The files of a namespace box at one moment, as layers that the keeper holds in memory.

Owns: the copy that makes them durable: files with holes, links (hard ones too), devices that are whiteouts, times,
modes, owners, and the overlay's marks on folders, in a folder a layer that mounts as it is. Refuses: sockets and
named pipes have no content and are left out.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.core.errors import SnapshotError
from tandem.sandbox.backend import Layer, Root

MARK = ".overlay."  # in trusted. or user., as the machine mounts it


class NamespaceFrozen:
    """``held`` are the layers that live only in memory; ``let_go`` tells the keeper that one is not held any more."""

    live = False

    def __init__(self, root: Root, held: tuple[Path, ...], let_go: Callable[[str], None]) -> None:
        self._root = root
        self._held = held
        self._let_go = let_go
        self._released = False

    @property
    def root(self) -> Root:
        return self._root

    async def save(self, folder: Path) -> Root:
        """Raises SnapshotError, OSError (a full disk)."""
        if self._released:
            raise SnapshotError("the snapshot was released before it was saved")
        layers: list[Layer] = []
        for number, layer in enumerate(self._root.layers):
            if layer.path in self._held:
                target = folder / f"layer-{number}"
                await asyncio.to_thread(copy_layer, layer.path, target)
                layer = Layer(path=target)
            layers.append(layer)
        return replace(self._root, layers=tuple(layers))

    async def release(self) -> None:
        if not self._released:
            self._released = True
            for path in self._held:
                self._let_go(str(path))


def copy_layer(source: Path, target: Path) -> None:
    """Everything is on the disk when this returns."""
    target.mkdir(parents=True)
    _copy_folder(f"{source}/.", str(target), {})
    describe(f"{source}/.", str(target), os.stat(f"{source}/."))
    sync_file_system(target)


def sync_file_system(folder: Path) -> None:
    """All that was written to the folder's file system is on the disk. For many files this is one wait, where fsync
    would be one for each; other disks of the machine are left alone. Raises OSError: it could not be written."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(folder))
    finally:
        os.close(descriptor)


def _copy_folder(source: str, target: str, seen: dict[tuple[int, int], str]) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            old, new = entry.path, os.path.join(target, entry.name)
            key = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and key in seen and not stat.S_ISDIR(status.st_mode):
                os.link(seen[key], new, follow_symlinks=False)
                continue
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(new)
                _copy_folder(old, new, seen)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(old), new)
            elif stat.S_ISREG(status.st_mode):
                _copy_data(old, new, status.st_size)
            elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                os.mknod(new, stat.S_IFCHR, 0)
            else:
                continue
            seen[key] = new
            describe(old, new, status)


def _copy_data(old: str, new: str, size: int) -> None:
    with open(old, "rb") as reader, open(new, "wb") as writer:
        position = 0
        while position < size:
            try:
                start = os.lseek(reader.fileno(), position, os.SEEK_DATA)
            except OSError:
                break  # a hole to the end
            end = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            os.lseek(reader.fileno(), start, os.SEEK_SET)
            os.lseek(writer.fileno(), start, os.SEEK_SET)
            while start < end:
                done = os.sendfile(writer.fileno(), reader.fileno(), start, end - start)
                if done == 0:
                    break
                start += done
            position = end
        writer.truncate(size)


def describe(old: str, new: str, status: os.stat_result) -> None:
    """Owner, mode, marks and times of one name for another. Raises OSError."""
    is_link = stat.S_ISLNK(status.st_mode)
    if os.geteuid() == 0:
        os.chown(new, status.st_uid, status.st_gid, follow_symlinks=False)
    if not is_link:
        os.chmod(new, stat.S_IMODE(status.st_mode))
        if not stat.S_ISCHR(status.st_mode):
            for name in os.listxattr(old, follow_symlinks=False):
                if MARK not in name or name.endswith(".opaque") or ".overlay.overlay." in name:
                    os.setxattr(new, name, os.getxattr(old, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
