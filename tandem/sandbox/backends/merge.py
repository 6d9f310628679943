"""Many layers of one box's files as one: for chains of snapshots that would make its root a deep stack.

Owns: what overlayfs shows of some layers, as one layer over whatever lies below them: the topmost file of a name wins,
folders are joined down to an opaque one, and what hides something below goes on to hide it. Files are hard links: no
data is copied, and the layers stay as they are. Refuses: layers of different file systems.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from tandem.core.errors import SnapshotError
from tandem.sandbox.backends.frozen import describe

MERGE_AT = 32  # a lookup of a name that is nowhere takes 1 us a layer


def merge_layers(tmpfs: str, uppers: Sequence[str], target: str, *, device: int) -> None:
    """Make the folder ``target`` of folders of one file system, top first, all named relative to ``tmpfs``; that is
    looked up once, and must be on ``device``. Blocks.

    Raises:
        SnapshotError: another file system. OSError: no room for its folders; a part of it may be there.
    """
    handle = os.open(tmpfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_dev != device:
            raise SnapshotError("its file system is gone")
        place = f"/proc/self/fd/{handle}"
        sources = [f"{place}/{upper}" for upper in uppers]
        os.mkdir(f"{place}/{target}")
        _merge(sources, f"{place}/{target}")
        describe(sources[0], f"{place}/{target}", os.stat(sources[0]))
    finally:
        os.close(handle)


def _merge(sources: Sequence[str], target: str) -> None:
    done: set[str] = set()
    for depth, source in enumerate(sources):
        with os.scandir(source) as entries:
            for entry in entries:
                if entry.name in done:
                    continue
                done.add(entry.name)
                made = os.path.join(target, entry.name)
                if not entry.is_dir(follow_symlinks=False):
                    os.link(entry.path, made, follow_symlinks=False)
                    continue
                joined, mark = _joined(entry.path, [os.path.join(each, entry.name) for each in sources[depth + 1:]])
                os.mkdir(made)
                _merge(joined, made)
                describe(entry.path, made, entry.stat(follow_symlinks=False))
                if mark:
                    os.setxattr(made, mark, b"y")


def _joined(folder: str, lower: Sequence[str]) -> tuple[list[str], str]:
    """The folders that show as one, and the mark that it needs where nothing below may show through ('' : none)."""
    joined = [folder]
    if mark := _opaque(folder):
        return joined, mark
    for path in lower:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        except NotADirectoryError:  # a parent of it is hidden there
            break
        if not stat.S_ISDIR(status.st_mode):  # a file or a whiteout ends it
            return joined, "trusted.overlay.opaque" if os.geteuid() == 0 else "user.overlay.opaque"
        joined.append(path)
        if mark := _opaque(path):
            return joined, mark
    return joined, ""


def _opaque(folder: str) -> str:
    for name in os.listxattr(folder):
        if name.endswith(".overlay.opaque"):
            return name
    return ""
