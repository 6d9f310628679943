from __future__ import annotations

import os
import stat
import tarfile

import pytest
from image_pieces import folder, link, make_tar, member

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tar_reader import read_tar
from tandem.sandbox.images.tree import build_tree
from tandem.sandbox.images.unpack import unpack


def test_files_links_and_removals(tmp_path):
    tar = make_tar([
        folder("d", mode=0o1777, mtime=5), member("d/f", b"x" * 3_000_000, mode=0o640, mtime=7),
        link("l", "/etc/passwd"),
        member("h", type=tarfile.LNKTYPE, linkname="d/f"), member("d/.wh.gone"), folder("o"), member("o/.wh..wh..opq"),
    ])
    target = tmp_path / "root"
    unpack(build_tree(read_tar(tar)).root, tar, target)
    assert (target / "d/f").read_bytes() == b"x" * 3_000_000 and (target / "d/f").stat().st_mtime == 7
    assert stat.S_IMODE((target / "d/f").stat().st_mode) == 0o640
    assert stat.S_IMODE((target / "d").stat().st_mode) == 0o1777 and (target / "d").stat().st_mtime == 5
    assert os.path.samefile(target / "h", target / "d/f") and os.readlink(target / "l") == "/etc/passwd"
    assert stat.S_ISCHR((target / "d/gone").lstat().st_mode) and (target / "d/gone").lstat().st_rdev == 0
    space = "trusted" if os.geteuid() == 0 else "user"
    assert os.getxattr(target / "o", f"{space}.overlay.opaque") == b"y"


def test_a_link_never_leads_out(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    tar = make_tar([link("out", str(outside)), member("out/evil", b"1")])
    unpack(build_tree(read_tar(tar)).root, tar, tmp_path / "root")
    assert list(outside.iterdir()) == []


def test_what_the_file_system_refuses_is_named(tmp_path):
    tar = make_tar([member("n" * 300)])
    with pytest.raises(SandboxError, match="cannot be unpacked"):
        unpack(build_tree(read_tar(tar)).root, tar, tmp_path / "root")
