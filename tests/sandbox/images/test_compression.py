from __future__ import annotations

import gzip
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.sandbox.images.compression import decompressed

COMPRESS = {"gzip": gzip.compress, "zstd": zstandard.compress, "plain": bytes}


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=3000), max_size=4), size=st.integers(1, 400),
       how=st.sampled_from(sorted(COMPRESS)))
def test_any_cut_of_any_number_of_members(parts, size, how):
    data = b"".join(COMPRESS[how](part) for part in parts)
    assert b"".join(decompressed(cut(data, size), what="x")) == b"".join(parts)


@pytest.mark.parametrize("isal", [True, False])
def test_gzip_with_and_without_isal(isal, monkeypatch):
    if not isal:
        monkeypatch.setitem(sys.modules, "isal", None)
    data = gzip.compress(b"a" * 100_000) + gzip.compress(b"b") + bytes(100)
    assert b"".join(decompressed(cut(data, 50), what="x")) == b"a" * 100_000 + b"b"


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_broken_stream_is_an_error(how):
    data = COMPRESS[how](bytes(range(256)) * 100)
    with pytest.raises(SandboxError, match="cut off|decompress"):
        list(decompressed([data[:-6]], what="layer x"))
    with pytest.raises(SandboxError, match="layer x does not decompress"):
        list(decompressed([data[:4] + b"\xff" * 60 + data[64:]], what="layer x"))


def test_zstd_without_its_package_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SandboxUnavailable, match="zstandard"):
        list(decompressed([zstandard.compress(b"x")], what="x"))
