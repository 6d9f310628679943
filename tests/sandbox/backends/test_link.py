"""Sockets of a box's network namespace in the hands of the host."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxGone
from tandem.sandbox.backend import Start
from tandem.sandbox.backends.link import Link
from tandem.sandbox.backends.namespace import NamespaceBackend, NamespaceBox

ECHO = """
import socket
name, family = ("::1", socket.AF_INET6) if {v6} else ("127.0.0.1", socket.AF_INET)
server = socket.create_server((name, 7000), family=family)
print("up", flush=True)
while True:
    peer, _ = server.accept()
    while data := peer.recv(65536):
        peer.sendall(data)
    peer.close()
"""


@pytest.mark.parametrize("v6", [False, True])
def test_a_port_of_the_box_is_reached_and_no_port_of_the_host(v6: bool) -> None:
    async def echoed(box: NamespaceBox, data: bytes) -> bytes:
        reader, writer = await box.connect(7000)
        writer.write(data)
        got = await reader.readexactly(len(data))
        writer.close()
        return got

    async def main() -> None:
        if v6 and not os.path.exists("/proc/net/if_inet6"):
            pytest.skip("no IPv6")
        backend = NamespaceBackend()
        box = await backend.create(SandboxSpec(), timeout_s=20)
        with socket.create_server(("127.0.0.1", 0)) as ours, pytest.raises(ConnectionRefusedError):
            await box.connect(ours.getsockname()[1])
        process = await box.start(Start(arguments=["python3", "-c", ECHO.format(v6=v6)]))
        async for piece in process.output(from_start=True):
            assert piece.data == b"up\n"
            break
        data = os.urandom(300_000)
        files = len(os.listdir("/proc/self/fd"))
        assert await asyncio.gather(*(echoed(box, data) for _ in range(1))) == [data]
        for _ in range(20):
            assert await echoed(box, b"again") == b"again"
        await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= files
        await box.kill()
        with pytest.raises(SandboxGone):
            await box.connect(7000)
        await backend.close()

    asyncio.run(main())


def test_a_descriptor_comes_before_its_bytes_and_none_is_left() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        heard: list[bytes] = []
        lost = asyncio.Event()
        link = Link(ours, heard.append, lost.set)
        with pytest.raises(LookupError):
            link.take()
        reader, writer = socket.socketpair()
        socket.send_fds(theirs, [b"two"], [reader.fileno(), reader.fileno()])
        reader.close()
        while not heard:
            await asyncio.sleep(0.01)
        taken = link.take()
        writer.sendall(b"through")
        assert taken.recv(7) == b"through"
        taken.close()
        theirs.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert writer.recv(1) == b""  # the untaken copy was closed, too
        writer.close()

    asyncio.run(main())
