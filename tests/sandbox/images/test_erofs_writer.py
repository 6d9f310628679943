"""The kernel reads what we write as tarfile reads the tar."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from image_pieces import folder, link, make_tar, member

from tandem.core.errors import SandboxError
from tandem.sandbox.images.erofs_mount import can_mount_index, mount_erofs
from tandem.sandbox.images.erofs_writer import write_erofs
from tandem.sandbox.images.tar_reader import read_tar
from tandem.sandbox.images.tree import Node, build_tree
from tandem.sandbox.images.tree import folder as empty_folder


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if problem := can_mount_index(tmp_path):
        pytest.skip(problem)
    return tmp_path


def mount(disk: Path, tar: bytes) -> int:
    (disk / "layer.tar").write_bytes(tar)
    image = write_erofs(build_tree(read_tar(tar)).root, device_bytes=len(tar))
    (disk / "index").write_bytes(image)
    return mount_erofs(disk / "index", device=disk / "layer.tar")


def seen(place: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=place, follow_symlinks=False)


def read(place: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=place), "rb") as file:
        return file.read()


def everything(place: int) -> list[str]:
    found = []
    for parent, folders, files, _ in os.fwalk(".", dir_fd=place):
        found += [os.path.normpath(os.path.join(parent, name)) for name in (*folders, *files)]
    return sorted(found)


def test_files_as_tarfile_says(disk):
    big = bytes(range(256)) * 1000
    members = [folder("d", mode=0o1777, uid=7, gid=8, mtime=1234567890.5), folder("empty")]
    members += [member(f"d/file-{number:04}-{'n' * (number % 200)}", big[: number * 37], mode=0o640 | number % 8,
                       uid=number, gid=100_000 + number, mtime=number) for number in range(600)]
    members += [link("short", "d/x"), link("long", "t" * 700), link("medium", "t" * 440), member("d/.hidden", b"h"),
                member("-dash", b""), member("é", b"utf-8"), member("x" * 255, b"name")]
    tar = make_tar(members)
    place = mount(disk, tar)
    try:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            infos = archive.getmembers()
            for info in infos:
                found = seen(place, info.name)
                assert (found.st_uid, found.st_gid, found.st_mtime) == (info.uid, info.gid, info.mtime), info.name
                if info.issym():
                    assert os.readlink(info.name, dir_fd=place) == info.linkname
                else:
                    assert stat.S_IMODE(found.st_mode) == info.mode
                if info.isreg():
                    content = archive.extractfile(info)
                    assert content is not None and read(place, info.name) == content.read()
        assert everything(place) == sorted(info.name for info in infos)
        assert seen(place, ".").st_nlink == 4 and seen(place, "d").st_nlink == 2
        with pytest.raises(FileNotFoundError):
            seen(place, "d/file-0600")
    finally:
        os.close(place)


def test_attributes_of_any_size(disk):
    members = []
    for length in (0, 1, 100, 3000):
        info, body = member(f"f{length}", b"x")
        info.pax_headers = {"SCHILY.xattr.user.value": "v" * length, "SCHILY.xattr.trusted.other": "o",
                            "SCHILY.xattr.unknown.space": "left out"}
        members.append((info, body))
    info, _ = folder("d")
    info.pax_headers = {"SCHILY.xattr.user.value": "on a folder"}
    place = mount(disk, make_tar([*members, (info, b"")]))
    try:
        for length in (0, 1, 100, 3000):
            path = f"/proc/self/fd/{place}/f{length}"
            assert os.getxattr(path, "user.value") == b"v" * length and os.getxattr(path, "trusted.other") == b"o"
            assert sorted(os.listxattr(path)) == ["trusted.other", "user.value"]
            assert read(place, f"f{length}") == b"x"
        assert os.getxattr(f"/proc/self/fd/{place}/d", "user.value") == b"on a folder"
    finally:
        os.close(place)


def test_hard_links_are_one_inode(disk):
    tar = make_tar([member("a", b"same"), folder("d"), member("d/b", type=tarfile.LNKTYPE, linkname="a"),
                    member("c", type=tarfile.LNKTYPE, linkname="./d/b")])
    place = mount(disk, tar)
    try:
        assert len({seen(place, name).st_ino for name in ("a", "d/b", "c")}) == 1
        assert seen(place, "c").st_nlink == 3 and read(place, "d/b") == b"same"
    finally:
        os.close(place)


def test_whiteouts_and_opaque_folders(disk):
    tar = make_tar([folder("d"), member("d/.wh..wh..opq"), member("d/new", b"n"), member("e/.wh.gone")])
    place = mount(disk, tar)
    try:
        assert os.getxattr(f"/proc/self/fd/{place}/d", "trusted.overlay.opaque") == b"y"
        gone = seen(place, "e/gone")
        assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
        assert everything(place) == ["d", "d/new", "e", "e/gone"]
    finally:
        os.close(place)


def test_a_tree_without_a_tar(disk):
    root = empty_folder()
    assert root.children is not None
    root.children[b"f"] = Node(mode=0o100600, data=b"own bytes" * 200)
    (disk / "image").write_bytes(write_erofs(root, device_bytes=0))
    place = mount_erofs(disk / "image")
    try:
        assert read(place, "f") == b"own bytes" * 200
    finally:
        os.close(place)


def test_equal_trees_give_equal_bytes():
    tar = make_tar([member("b", b"1"), member("a", b"2"), folder("d")])
    first, second = (write_erofs(build_tree(read_tar(tar)).root, device_bytes=len(tar)) for _ in range(2))
    assert first == second


def test_what_the_format_cannot_hold_is_refused():
    root = empty_folder()
    assert root.children is not None
    root.children[b"n" * 256] = Node(mode=0o100600)
    with pytest.raises(SandboxError, match="no name"):
        write_erofs(root, device_bytes=0)
