"""The resolver in a box."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_pieces import Door, Table, door

from tandem.core.boxes import NetworkPolicy
from tandem.sandbox.network.gate import NAME_PORT
from tandem.sandbox.network.stub import AAAA, A, Broken, Question, answer, read_question


def question(name: str, kind: int = A, *, number: int = 77) -> bytes:
    labels = b"".join(bytes((len(part),)) + part.encode() for part in name.split(".")) + b"\0"
    return struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, 1)


async def ask(at: Door, data: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", at.ports[NAME_PORT]))
        await loop.sock_sendall(client, data)
        return await asyncio.wait_for(loop.sock_recv(client, 4096), 30)


def code(reply: bytes) -> tuple[int, int, int]:
    """Number, code, answers."""
    number, flags, _, answers, _, _ = struct.unpack_from(">HHHHHH", reply)
    assert flags & 0x8000
    return number, flags & 15, answers


def test_allowed_names_are_told_and_nothing_else_travels() -> None:
    async def main() -> None:
        table = Table(a_org=["1.2.3.4", "2606:4700::1"])
        async with door(NetworkPolicy(allow=("a.org",)), table) as at:
            reply = await ask(at, question("A.org"))
            assert code(reply) == (77, 0, 1) and reply.endswith(bytes((1, 2, 3, 4)))
            assert (await ask(at, question("a.org", AAAA))).endswith(ipaddress.ip_address("2606:4700::1").packed)
            asked = len(table.asked)
            for data in (question("c2VjcmV0.evil.org"), question("a.org", 16), question("a.org", 255)):
                assert code(await ask(at, data)) == (77, 5, 0)
            assert len(table.asked) == asked
            assert code(await ask(at, b"\0\x07junk")) == (7, 1, 0)
            assert [each.allowed for each in at.told] == [True, True, False, False, False, False]
            assert at.told[2].target == "dns c2VjcmV0.evil.org A"

    asyncio.run(main())


def test_a_name_without_address_fails() -> None:
    async def main() -> None:
        async with door(NetworkPolicy(internet=True), Table()) as at:
            assert code(await ask(at, question("gone.org"))) == (77, 2, 0)

    asyncio.run(main())


def test_many_addresses_fit_in_a_datagram() -> None:
    raw = question("a" * 63 + "." + "b" * 63 + ".org", AAAA)
    asked = read_question(raw)
    reply = answer(asked, 0, [ipaddress.IPv6Address(number) for number in range(50)])
    assert code(reply) == (77, 0, 12) and len(reply) <= 512


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 12, question("a.org")[:-3], question("a.org").replace(b"\x03org", b"\xc0\x0corg")]
)
def test_what_is_no_question_is_said(data: bytes) -> None:
    with pytest.raises(Broken):
        read_question(data)


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_break_it(tail: bytes) -> None:
    data = struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + tail
    try:
        assert isinstance(read_question(data), Question)
    except Broken:
        return
