from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from tandem.sandbox.archive import pack, unpack


def seen(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that a layer holds, by name."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        keys = os.listxattr(path, follow_symlinks=False)
        xattrs = {key: os.getxattr(path, key, follow_symlinks=False) for key in keys}
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_rdev, int(status.st_mtime), xattrs, content
        )
    return found


def test_a_layer_comes_back_as_it_was_and_packs_to_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "layer"
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/file").write_bytes(os.urandom(100_000))
    (folder / "empty").touch()
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o4755)
    (folder / ("long" * 50)).write_text("long name")
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / os.fsdecode(b"caf\xe9")).write_text("not UTF-8")
    (folder / "link").symlink_to("../outside")
    os.link(folder / "deep/er/file", folder / "hard")
    os.mkfifo(folder / "fifo")
    try:
        os.setxattr(folder / "deep", "user.overlay.opaque", b"y")
        os.setxattr(folder / "run", "user.any", bytes(range(256)))
    except OSError:
        pytest.skip("this file system has no extended attributes")
    if os.geteuid() == 0:
        os.mknod(folder / "whiteout", stat.S_IFCHR, os.makedev(0, 0))
        os.chown(folder / "run", 1234, 5678)
        (folder / "run").chmod(0o4755)
        os.setxattr(folder / "deep/er", "trusted.overlay.opaque", b"y")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    pack(folder, tmp_path / "one.tar")
    unpack(tmp_path / "one.tar", tmp_path / "back")
    wanted = seen(folder)
    del wanted["socket"]
    found = seen(tmp_path / "back")
    assert found.pop(".")[0] == wanted.pop(".")[0]
    assert found == wanted
    assert (tmp_path / "back/hard").stat().st_ino == (tmp_path / "back/deep/er/file").stat().st_ino
    os.utime(tmp_path / "back", ns=(folder.stat().st_atime_ns, folder.stat().st_mtime_ns))
    pack(tmp_path / "back", tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_a_folder_that_is_gone_leaves_no_archive(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pack(tmp_path / "gone", tmp_path / "a.tar")
    assert not (tmp_path / "a.tar").exists()
