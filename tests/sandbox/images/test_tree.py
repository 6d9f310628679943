from __future__ import annotations

import stat
import tarfile

import pytest
from image_pieces import folder, link, make_tar, member

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tar_reader import read_tar
from tandem.sandbox.images.tree import OPAQUE_XATTR, Node, Tree, build_tree


def tree(*members) -> Tree:
    return build_tree(read_tar(make_tar(members)))


def at(built: Tree, path: str) -> Node:
    node = built.root
    for part in path.split("/"):
        assert node.children is not None
        node = node.children[part.encode()]
    return node


def test_missing_folders_are_made_and_later_described():
    built = tree(member("a/b/c", b"1"), folder("a", mode=0o700, uid=5))
    assert stat.S_IMODE(at(built, "a").mode) == 0o700 and at(built, "a").uid == 5
    assert stat.S_IMODE(at(built, "a/b").mode) == 0o755 and at(built, "a/b/c").size == 1


def test_the_last_of_equal_names_counts():
    built = tree(folder("a"), member("a/x"), member("a", b"file"), member("b"), folder("b"), member("b/y"))
    assert not at(built, "a").is_folder and at(built, "b/y").size == 0


def test_a_path_through_a_link_goes_where_the_link_goes():
    built = tree(folder("usr"), folder("usr/lib"), link("lib", "usr/lib"), member("lib/x", b"1"))
    assert at(built, "usr/lib/x").size == 1
    built = tree(link("a", "/../../b"), member("a/x"))
    assert at(built, "b/x").size == 0
    with pytest.raises(SandboxError, match="never end"):
        tree(link("a", "b"), link("b", "a"), member("a/x"))


@pytest.mark.parametrize("name", [".wh.d", "d/.wh..wh..opq"])
def test_removed_below_and_made_anew_is_opaque(name):
    for members in ([folder("d"), member("d/x"), member(name)], [member(name), folder("d"), member("d/x")]):
        built = tree(*members)
        assert at(built, "d").xattrs[OPAQUE_XATTR] == b"y" and at(built, "d/x").size == 0


def test_a_whiteout_does_not_touch_a_file_of_its_own_layer():
    assert stat.S_ISREG(at(tree(member("f", b"1"), member(".wh.f")), "f").mode)
    assert stat.S_ISREG(at(tree(member(".wh.f"), member("f", b"1")), "f").mode)
    assert at(tree(member(".wh.f")), "f").is_whiteout


def test_an_image_brings_no_devices_and_no_overlay_attributes():
    info, body = folder("d")
    info.pax_headers = {f"SCHILY.xattr.{name}": "1" for name in (
        "trusted.overlay.redirect", "user.overlay.metacopy", "user.fine")}  # fmt: skip
    built = tree((info, body), member("sda", type=tarfile.BLKTYPE, devmajor=8),
                 member("zero", type=tarfile.CHRTYPE, devmajor=0, devminor=0))
    assert at(built, "d").xattrs == {b"user.fine": b"1"}
    assert built.num_skipped_devices == 2 and list(built.root.children or ()) == [b"d"]


@pytest.mark.parametrize("target", ["nothing", "d", "../a"])
def test_a_hard_link_leads_to_a_file_of_its_layer(target):
    with pytest.raises(SandboxError, match="hard link|leads out"):
        tree(folder("d"), member("h", type=tarfile.LNKTYPE, linkname=target))
