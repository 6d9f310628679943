from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_pieces import folder, link, make_tar, member

from tandem.core.errors import SandboxError
from tandem.sandbox.images.tar_reader import read_tar

PAX = tarfile.PAX_FORMAT
LONG = "/".join(["a" * 90] * 4)


def names() -> st.SearchStrategy[str]:
    part = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40)
    return st.lists(part.filter(lambda text: text not in (".", "..")), min_size=1, max_size=6).map("/".join)


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(
        st.tuples(names(), st.binary(max_size=1500), st.integers(0, 0o7777), st.integers(0, 2**33), st.floats(0, 4e9)),
        max_size=6,
    ),
    format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_it_reads_what_tarfile_reads(members, format):
    data = make_tar(
        [member(name, body, mode=mode, uid=uid, gid=uid + 1, mtime=mtime if format == PAX else mtime // 1)
         for name, body, mode, uid, mtime in members],
        format,
    )
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, info.mode, info.uid, info.gid, info.mtime, info.size, info.offset_data) for info in tar]
    found = [
        (entry.path.decode(), entry.mode & 0o7777, entry.uid, entry.gid, entry.mtime, entry.size, entry.offset)
        for entry in read_tar(data)
    ]
    assert found == expected


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_kinds_of_members(format):
    path = "b" * 60 + "/" + "c" * 90
    data = make_tar([
        folder("./d/"), member("/abs//./file", b"x"), link("l", "../target"), member("p", type=tarfile.FIFOTYPE),
        member("h", type=tarfile.LNKTYPE, linkname="abs/file"), member(path, b"y"),
        member("dev", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    ], format)  # fmt: skip
    found = {entry.path.decode(): entry for entry in read_tar(data)}
    assert list(found) == ["d", "abs/file", "l", "p", "h", path, "dev"]
    assert found["l"].link == b"../target" and found["h"].link == b"abs/file"
    assert found["dev"].device == (1, 3)
    assert data[found[path].offset] == ord("y")


def test_long_links_and_attributes():
    info, body = member(LONG, b"x")
    info.pax_headers = {"SCHILY.xattr.user.word": "a=b\nc"}
    found = list(read_tar(make_tar([(info, body), link("l", LONG)])))
    assert found[0].path == LONG.encode() and found[0].xattrs == {b"user.word": b"a=b\nc"}
    assert found[1].link == LONG.encode() and found[1].xattrs == {}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/../x"])
def test_a_path_that_climbs_out_is_refused(name):
    with pytest.raises(SandboxError, match="leads out"):
        list(read_tar(make_tar([member(name)])))


def test_broken_tars_are_refused():
    good = make_tar([member("a", b"x" * 600)])
    with pytest.raises(SandboxError, match="broken or this is no tar"):
        list(read_tar(b"\1" + good[1:]))
    with pytest.raises(SandboxError, match="cut off"):
        list(read_tar(good[:1000]))
    with pytest.raises(SandboxError, match="sparse"):
        info, _ = member("s")
        info.pax_headers = {"GNU.sparse.major": "1"}
        list(read_tar(make_tar([(info, b"")])))
