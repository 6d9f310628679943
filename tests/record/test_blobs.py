"""Bytes under their digest."""

import pytest

from tandem.core.errors import RecordError
from tandem.core.wire import digest
from tandem.record.blobs import BlobStore


def test_round_trip_and_no_duplicates(tmp_path):
    store = BlobStore(tmp_path)
    name = store.put(b"abc")
    assert name == digest(b"abc") == store.put(b"abc")
    assert store.get(name) == b"abc"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [name]


def test_a_changed_or_missing_blob_is_refused(tmp_path):
    store = BlobStore(tmp_path)
    name = store.put(b"abc")
    (tmp_path / name[:2] / name).write_bytes(b"abd")
    with pytest.raises(RecordError, match="was changed"):
        store.get(name)
    with pytest.raises(RecordError, match="is missing"):
        store.get(digest(b"other"))
