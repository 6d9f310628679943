"""The last resort: a layer written out as files, for machines that cannot mount an index.

Owns: that nothing is written outside the folder (every step goes through descriptors of folders that this process
made and never through a link), and whiteouts and opaque folders as overlayfs reads them. Without root, files belong
to the caller and opaque folders are marked in the user's name space (mount the overlay with ``userxattr``).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tar_reader import Bytes
from tandem.sandbox.images.tree import OPAQUE_XATTR, Node

PIECE = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(root: Node, data: Bytes, target: Path) -> None:
    """Write a layer's tree into the new folder ``target``; ``data`` is its tar.

    Raises:
        SandboxError: the file system refuses (full, no such names).
    """
    target.mkdir()
    try:
        _Writer(data, target).run(root)
    except OSError as error:
        raise SandboxError(f"a layer cannot be unpacked to {target}: {error}") from error


class _Writer:
    def __init__(self, data: Bytes, target: Path) -> None:
        self._data = data
        self._target = target
        self._privileged = os.geteuid() == 0
        self._linked: dict[int, str] = {}  # inode with several names: its first path

    def run(self, root: Node) -> None:
        top = os.open(self._target, FOLDER)
        try:
            self._fill(root, top, "")
            self._finish(root, top)
        finally:
            os.close(top)

    def _fill(self, folder: Node, place: int, path: str) -> None:
        assert folder.children is not None
        for raw, node in folder.children.items():
            name = os.fsdecode(raw)
            if node.children is not None:
                os.mkdir(name, 0o700, dir_fd=place)
                inner = os.open(name, FOLDER, dir_fd=place)
                try:
                    self._fill(node, inner, f"{path}{name}/")
                    self._finish(node, inner)
                finally:
                    os.close(inner)
            else:
                self._put(node, place, name, path)

    def _put(self, node: Node, place: int, name: str, path: str) -> None:
        if (first := self._linked.get(id(node))) is not None:
            os.link(self._target / first, name, dst_dir_fd=place, follow_symlinks=False)
            return
        if node.num_links > 1:
            self._linked[id(node)] = path + name
        if stat.S_ISREG(node.mode):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o600, dir_fd=place)
            try:
                self._write(node, file)
                self._finish(node, file)
            finally:
                os.close(file)
            return
        if stat.S_ISLNK(node.mode):
            os.symlink(os.fsdecode(node.data or b""), name, dir_fd=place)
        elif node.is_whiteout:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=place)
            return
        elif stat.S_ISFIFO(node.mode):
            os.mkfifo(name, stat.S_IMODE(node.mode), dir_fd=place)
        if self._privileged:
            os.chown(name, node.uid, node.gid, dir_fd=place, follow_symlinks=False)
        os.utime(name, (node.mtime, node.mtime), dir_fd=place, follow_symlinks=False)

    def _write(self, node: Node, file: int) -> None:
        if node.data is not None:
            os.write(file, node.data)
            return
        for start in range(node.offset, node.offset + node.size, PIECE):
            piece = memoryview(self._data[start : min(start + PIECE, node.offset + node.size)])
            while piece:
                piece = piece[os.write(file, piece) :]

    def _finish(self, node: Node, descriptor: int) -> None:
        if self._privileged:
            os.fchown(descriptor, node.uid, node.gid)
        os.fchmod(descriptor, stat.S_IMODE(node.mode))
        for raw, value in node.xattrs.items():
            name = raw
            if raw == OPAQUE_XATTR and not self._privileged:
                name = b"user.overlay.opaque"
            required = raw == OPAQUE_XATTR
            with contextlib.nullcontext() if required else contextlib.suppress(OSError):  # others: where one may
                os.setxattr(descriptor, name, value)
        os.utime(descriptor, (node.mtime, node.mtime))
