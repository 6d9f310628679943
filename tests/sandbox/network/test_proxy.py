"""HTTP and SOCKS as clients speak them, through a gate on loopback."""

from __future__ import annotations

import asyncio
import struct

import pytest
from network_pieces import Door, Table, door, server
from test_hello import hello

from tandem.core.boxes import NetworkPolicy

HERE = NetworkPolicy(allow=("a.org", "127.0.0.1"), private=("127.0.0.1",))
NAMES = {"a_org": ["127.0.0.1"]}
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: x\r\n\r\nhi"


def test_a_plain_request_goes_to_its_url_whatever_its_header_says() -> None:
    async def main() -> None:
        async with server(ANSWER) as (port, heard), door(HERE, Table(**NAMES)) as at:
            reply = await at.ask(
                f"POST http://me:pw@a.org:{port}/x?y=1 HTTP/1.1\r\nHost: evil.org\r\nProxy-Authorization: z\r\n"
                "Connection: x-mine\r\nX-Mine: 1\r\nContent-Length: 3\r\n\r\nabc".encode()
            )
            assert reply.startswith(b"HTTP/1.1 200") and reply.endswith(b"\r\n\r\nhi")
            assert b"connection: close" in reply.lower() and b"keep-alive" not in reply.lower()
            sent = b"".join(heard)
            assert sent.startswith(f"POST /x?y=1 HTTP/1.1\r\nhost: a.org:{port}\r\n".encode()) and sent.endswith(b"abc")
            assert b"evil" not in sent and b"x-mine" not in sent.lower() and b"authorization" not in sent.lower()
            assert [(each.target, each.allowed) for each in at.told] == [(f"a.org:{port}", True)]

    asyncio.run(main())


@pytest.mark.parametrize(("request_line", "status"), [
    ("GET http://b.org/ HTTP/1.1", b"403"), ("GET http://10.0.0.1/ HTTP/1.1", b"403"),
    ("GET http://[::ffff:10.0.0.1]/ HTTP/1.1", b"403"), ("GET http://0x7f.1/ HTTP/1.1", b"403"),
    ("GET /x HTTP/1.1", b"400"), ("GET https://a.org/ HTTP/1.1", b"400"), ("GET http://a.org:x/ HTTP/1.1", b"400"),
    ("CONNECT b.org:443 HTTP/1.1", b"403"), ("CONNECT a.org HTTP/1.1", b"400"), ("CONNECT [::1]:22 HTTP/1.1", b"403"),
    ("CONNECT a.org:0 HTTP/1.1", b"403"), ("no http at all", b"400"),
])  # fmt: skip
def test_what_is_refused_says_why(request_line: str, status: bytes) -> None:
    async def main() -> None:
        async with door(HERE, Table(**NAMES)) as at:
            reply = await at.ask(f"{request_line}\r\nHost: a.org\r\n\r\n".encode())
            assert reply.split(b" ")[1] == status and len(reply.split(b"\r\n\r\n")[1]) > 10

    asyncio.run(main())


def test_a_tunnel_of_a_name_passes_tls_for_that_name_only() -> None:
    async def main() -> None:
        async with server(echo=True) as (port, heard), door(HERE, Table(**NAMES)) as at:
            good, bad, none = hello("a.org"), hello("evil.org"), hello(None)
            for first in (bad, none, b"GET / HTTP/1.1\r\nHost: evil.org\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"):
                status, reader, writer = await at.tunnel(f"a.org:{port}")
                assert b"200" in status
                writer.write(first)
                with pytest.raises(ConnectionError):
                    assert await asyncio.wait_for(reader.readexactly(1), 30)
                writer.close()
            assert heard == [] and [each.why[:4] for each in at.told if not each.allowed] == ["cut:"] * 4
            _, reader, writer = await at.tunnel(f"a.org:{port}")
            for part in (good[:7], good[7:], b"more"):
                writer.write(part)
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(reader.readexactly(len(good) + 4), 30) == good + b"more"
            writer.close()

    asyncio.run(main())


def test_a_tunnel_of_an_address_passes_anything_and_both_ends() -> None:
    async def main() -> None:
        async with server(echo=True) as (port, _), door(HERE) as at:
            status, reader, writer = await at.tunnel(f"127.0.0.1:{port}")
            data = bytes(range(256)) * 4000
            writer.write(b"GET it " + data)
            assert b"200" in status
            assert await asyncio.wait_for(reader.readexactly(7 + len(data)), 30) == b"GET it " + data
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 30) == b""

    asyncio.run(main())


async def socks(at: Door, request: bytes) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await at.connect()
    writer.write(b"\x05\x01\x00" + request)
    assert await asyncio.wait_for(reader.readexactly(2), 30) == b"\x05\x00"
    reply = await asyncio.wait_for(reader.readexactly(10), 30)
    return reply[1], reader, writer


def test_socks_by_address_and_by_name() -> None:
    async def main() -> None:
        async with server(echo=True) as (port, _), door(HERE, Table(**NAMES)) as at:
            at_port = struct.pack(">H", port)
            for place, first in ((b"\x01\x7f\x00\x00\x01", b"anything"), (b"\x03\x05a.org", hello("a.org"))):
                code, reader, writer = await socks(at, b"\x05\x01\x00" + place + at_port)
                writer.write(first)
                assert code == 0 and await asyncio.wait_for(reader.readexactly(len(first)), 30) == first
                writer.close()
            mapped = b"\x04" + b"\0" * 10 + b"\xff\xff\xa9\xfe\xa9\xfe"
            for request, wanted in (
                (b"\x05\x01\x00\x01\x0a\x00\x00\x01" + at_port, 2), (b"\x05\x01\x00\x03\x05b.org" + at_port, 2),
                (b"\x05\x01\x00" + mapped + at_port, 2), (b"\x05\x03\x00\x01\x7f\x00\x00\x01" + at_port, 7),
                (b"\x05\x02\x00\x01\x7f\x00\x00\x01" + at_port, 7),
            ):  # fmt: skip
                code, _, writer = await socks(at, request)
                writer.close()
                assert code == wanted
            reader, writer = await at.connect()
            writer.write(b"\x05\x01\x02")  # a password is all it offers
            assert await asyncio.wait_for(reader.read(), 30) == b"\x05\xff"

    asyncio.run(main())
