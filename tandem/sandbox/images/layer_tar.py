"""Layers of our own making: from the folder of a snapshot, or file by file, to the tar that any registry takes.

Owns: the way back of ``tree``: character devices 0/0 become ``.wh.NAME``, opaque folders get ``.wh..wh..opq``. The
same files give the same bytes: names sorted, owners as numbers, no user names.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import IO

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tree import FOREIGN_XATTRS, OPAQUE, WHITEOUT
from tandem.sandbox.images.view import FOLDER, is_opaque


class LayerWriter:
    """Writes one layer's tar to a file."""

    def __init__(self, target: Path) -> None:
        self._file = target.open("wb")
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)
        self._folders: set[str] = set()
        self.num_members = 0

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()
        self._file.close()

    def has_folder(self, path: str) -> bool:
        return path in self._folders

    def folder(self, path: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0, mtime: float = 0) -> None:
        """Once for each path; a second time changes nothing."""
        if path not in self._folders:
            self._folders.add(path)
            self._put(_info(path, tarfile.DIRTYPE, mode, uid, gid, mtime))

    def file(self, path: str, data: IO[bytes], size: int, *, mode: int, uid: int, gid: int, mtime: float) -> None:
        info = _info(path, tarfile.REGTYPE, mode, uid, gid, mtime)
        info.size = size
        self._put(info, data)

    def link(self, path: str, target: str, *, uid: int, gid: int, mtime: float) -> None:
        info = _info(path, tarfile.SYMTYPE, 0o777, uid, gid, mtime)
        info.linkname = target
        self._put(info)

    def mark(self, path: str) -> None:
        """An empty file: a whiteout by its name."""
        self._put(_info(path, tarfile.REGTYPE, 0, 0, 0, 0))

    def hard_link(self, path: str, target: str) -> None:
        info = _info(path, tarfile.LNKTYPE, 0, 0, 0, 0)
        info.linkname = target
        self._put(info)

    def copied(self, place: int, path: str, status: os.stat_result) -> None:
        """One file of a folder as it is, with its attributes."""
        kind = stat.S_IFMT(status.st_mode)
        types = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFREG: tarfile.REGTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
                 stat.S_IFIFO: tarfile.FIFOTYPE}  # fmt: skip
        if kind not in types:
            return  # sockets and devices: no part of an image
        info = _info(path, types[kind], stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime)
        if kind == stat.S_IFLNK:
            info.linkname = os.readlink(path or ".", dir_fd=place)
            self._put(info)
        elif kind == stat.S_IFIFO:
            self._put(info)
        else:
            flags = FOLDER if kind == stat.S_IFDIR else os.O_RDONLY | os.O_CLOEXEC
            descriptor = os.open(path or ".", flags | os.O_NOFOLLOW, dir_fd=place)
            with open(descriptor, "rb", closefd=True) if kind == stat.S_IFREG else _Folder(descriptor) as data:
                info.pax_headers = _xattrs(descriptor)
                info.size = status.st_size if kind == stat.S_IFREG else 0
                self._put(info, data if isinstance(data, io.IOBase) else None)
        if kind == stat.S_IFDIR:
            self._folders.add(path)

    def _put(self, info: tarfile.TarInfo, data: IO[bytes] | io.IOBase | None = None) -> None:
        self.num_members += 1
        self._tar.addfile(info, data)  # pyright: ignore[reportArgumentType]


class _Folder:
    """A folder's descriptor, closed with its block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def layer_to_tar(place: int, target: Path) -> int:
    """Write the layer whose top folder is open at ``place``; the number of members.

    Raises:
        SandboxError: a name that the image format keeps for itself.
    """
    seen: dict[tuple[int, int], str] = {}
    with LayerWriter(target) as writer:
        writer.copied(place, "", os.fstat(place))
        for path, status in _walk(place, ""):
            if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1 and not stat.S_ISCHR(status.st_mode):
                key = (status.st_dev, status.st_ino)
                if key in seen:
                    writer.hard_link(path, seen[key])
                    continue
                seen[key] = path
            parent, _, name = path.rpartition("/")
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                writer.mark(os.path.join(parent, f"{os.fsdecode(WHITEOUT)}{name}"))
                continue
            if name.startswith(os.fsdecode(WHITEOUT)):
                raise SandboxError(f"{path}: no image can hold a file of this name")
            writer.copied(place, path, status)
            if stat.S_ISDIR(status.st_mode) and is_opaque(place, path):
                writer.mark(f"{path}/{os.fsdecode(OPAQUE)}")
        return writer.num_members


def _walk(place: int, path: str) -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    waiting = [path]
    while waiting:
        parent = waiting.pop()
        descriptor = os.open(parent or ".", FOLDER | os.O_NOFOLLOW, dir_fd=place)
        try:
            names = sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)
        inner: list[str] = []
        for name in names:
            full = f"{parent}/{name}" if parent else name
            status = os.stat(full, dir_fd=place, follow_symlinks=False)
            found.append((full, status))
            if stat.S_ISDIR(status.st_mode):
                inner.append(full)
        waiting += reversed(inner)
    return found


def _xattrs(descriptor: int) -> dict[str, str]:
    """As PAX records; tarfile writes the very bytes back."""
    try:
        names = [name for name in os.listxattr(descriptor) if not os.fsencode(name).startswith(FOREIGN_XATTRS)]
        return {
            f"SCHILY.xattr.{name}": os.getxattr(descriptor, name).decode("utf-8", "surrogateescape")
            for name in sorted(names)
        }
    except OSError:
        return {}  # a file system without attributes


def _info(path: str, kind: bytes, mode: int, uid: int, gid: int, mtime: float) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path or ".")
    info.type, info.mode, info.uid, info.gid, info.mtime = kind, mode, uid, gid, mtime
    return info
