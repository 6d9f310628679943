from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from tandem.core.wire import digest
from tandem.sandbox.store import BlobStore, file_digest

DATA = os.urandom(3 * 2**20 + 17)
NAME = digest(DATA)


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    place = {"folder": f"{tmp_path}/blobs", "file": f"file://{tmp_path}/blobs", "memory": f"memory:/{tmp_path}"}
    return BlobStore(place[request.param])


def blob(folder: Path, data: bytes = DATA) -> Path:
    path = folder / "blob"
    path.write_bytes(data)
    return path


def test_a_blob_goes_in_and_comes_out_verified(store: BlobStore, tmp_path: Path) -> None:
    assert file_digest(blob(tmp_path)) == NAME and store.names() == set()
    for _ in range(2):
        store.put(blob(tmp_path), NAME)
        assert not (tmp_path / "blob").exists()
    assert store.names() == {NAME}
    store.fetch(NAME, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == DATA
    path = store.path(NAME)
    assert (path is not None) == store.local and (path is None or path.read_bytes() == DATA)
    store.delete(NAME)
    store.delete(NAME)
    assert store.names() == set()
    with pytest.raises(SnapshotMissing, match=NAME):
        store.fetch(NAME, tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_a_changed_blob_is_named_and_not_given_out(store: BlobStore, tmp_path: Path) -> None:
    store.put(blob(tmp_path), NAME)
    if store.local:
        assert store.path(NAME) is not None  # verified once: a later change is seen all the same
    with store._files.open(store._key(NAME), "wb") as file:
        file.write(DATA[:-1] + b"\0" if DATA[-1] else DATA[:-1] + b"\1")
    with pytest.raises(SnapshotCorrupt, match=NAME) as caught:
        store.fetch(NAME, tmp_path / "out")
    assert not (tmp_path / "out").exists() and "good copy" in caught.value.hint
    if store.local:
        with pytest.raises(SnapshotCorrupt, match=NAME):
            store.path(NAME)
    with store._files.open(store._key(NAME), "wb") as file:
        file.write(DATA[:100])  # a blob of another length is put anew
    store.put(blob(tmp_path), NAME)
    store.fetch(NAME, tmp_path / "out")


def test_a_scheme_that_nobody_knows_is_said() -> None:
    with pytest.raises(SnapshotError, match="moon://x cannot be opened"):
        BlobStore("moon://x")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, small_disk: Path) -> None:
    """A real small file system, full to the brim."""
    store = BlobStore(str(small_disk / "blobs"))
    with pytest.raises(SnapshotError, match="the disk is full") as caught:
        store.put(blob(tmp_path), NAME)
    assert "make room" in caught.value.hint and store.names() == set()
    small = digest(b"small")
    store.put(blob(tmp_path, b"small"), small)
    assert store.names() == {small}
    target = small_disk / "out"
    full = BlobStore(f"memory:/{tmp_path}/full")
    full.put(blob(tmp_path), NAME)
    with pytest.raises(SnapshotError, match="the disk is full"):
        full.fetch(NAME, target)
    assert not target.exists()
