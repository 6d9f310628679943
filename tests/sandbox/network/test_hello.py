"""ClientHellos, made by a real TLS client."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.sandbox.network.hello import NoHello, NotYet, server_name


def hello(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without certificates: it gets no answer
    context.check_hostname = name is not None
    to_client, from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, from_client, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return from_client.read()


def in_records(data: bytes, size: int) -> bytes:
    message = data[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


def test_the_name_is_read_and_its_absence() -> None:
    assert server_name(hello("a.example.org")) == "a.example.org"
    assert server_name(hello(None)) == ""
    assert server_name(hello("a.example.org") + b"more") == "a.example.org"


@pytest.mark.parametrize("size", [1, 3, 50])
def test_in_many_records(size: int) -> None:
    data = in_records(hello("a.example.org"), size)
    assert server_name(data) == "a.example.org"
    for cut in range(0, len(data) - 1, 37):
        with pytest.raises(NotYet):
            server_name(data[:cut])


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\n", b"\x16\x02", b"\x17\x03\x03\x00\x10", b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\x00\x01\x02",
    b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", b"\x16\x03\x01\x00\x08\x01\x00\x00\x04abcd",
])  # fmt: skip
def test_what_is_none_is_said(data: bytes) -> None:
    with pytest.raises(NoHello):
        server_name(data)


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 250))
def test_no_bytes_break_it(noise: bytes, at: int) -> None:
    data = hello("a.example.org")
    broken = data[:at] + noise + data[at + len(noise) :]
    with contextlib.suppress(NotYet, NoHello):
        assert isinstance(server_name(broken), str)
