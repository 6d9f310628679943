"""An agent that has gone over to the other side: its box ends, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct

import pytest

from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.backend import Call, Outcome, Start
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.frames import Frame, frame
from tandem.sandbox.backends.link import MAX_WAITING
from tandem.sandbox.backends.process import NamespaceProcess

CALL = Call(arguments=["true"], timeout_s=60, stdout_cap_bytes=4096, stderr_cap_bytes=4096)
LIES = {
    "no length": b"\0" * 64,
    "too long": struct.pack("<IBI", 2**31, Frame.STDOUT, 1),
    "short exit": frame(Frame.EXIT, 1, b"x"),
    "long exit": frame(Frame.EXIT, 1, b"x" * 999),
    "short acknowledgement": frame(Frame.STDIN_ACK, 1, b"x"),
    "short hello": frame(Frame.HELLO, 0, b""),
    "a socket that is none": frame(Frame.SOCKET, 1, struct.pack("<I", 0)),
    "short socket": frame(Frame.SOCKET, 1, b""),
    "too much output": frame(Frame.STDOUT, 1, b"x" * 5000),
    "a start that is none": frame(Frame.STARTED, 2, b"x"),
    "an error that is none": frame(Frame.EXIT, 2, struct.pack("<iIQQQ", 2**31 - 1, 4, 0, 0, 0)),
}


async def lied_to(words: bytes, rights: list[int]) -> None:
    """A call and a command under way; the agent says ``words``, then nothing more."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    broken = asyncio.Event()
    channel = Channel({}, lambda _: None, broken.set)
    channel.attach(ours)
    call = asyncio.create_task(channel.call(CALL))
    start = asyncio.create_task(channel.start(Start(arguments=["x"])))
    await asyncio.sleep(0)
    for _ in range(1 + MAX_WAITING // 4 if rights else 1):
        socket.send_fds(theirs, [words], rights)
        await asyncio.sleep(0)
    theirs.close()
    await asyncio.wait_for(broken.wait(), 30)
    channel.end("it is buried")
    ends = await asyncio.wait_for(asyncio.gather(call, start, return_exceptions=True), 30)
    lies = SandboxError | OSError | Outcome | NamespaceProcess  # the last two: of a lie that makes sense
    assert all(isinstance(end, lies) for end in ends), ends
    with pytest.raises(SandboxGone):
        await channel.call(CALL)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_box_at_once_and_leaves_nothing(lie: str) -> None:
    faults: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        held = len(os.listdir("/proc/self/fd"))
        await lied_to(LIES[lie], [])
        assert len(os.listdir("/proc/self/fd")) == held

    asyncio.run(main())
    assert faults == []


@pytest.mark.parametrize("named", [False, True], ids=["unasked", "no sockets"])
def test_descriptors_that_nobody_asked_for_do_not_pile_up(named: bool) -> None:
    async def main() -> None:
        with open("/dev/null", "rb") as null:
            held = len(os.listdir("/proc/self/fd"))
            words = frame(Frame.SOCKET, 9, struct.pack("<I", 0)) if named else frame(Frame.QUIET, 0)
            with contextlib.suppress(BrokenPipeError):  # it may be cut off before it has said all
                await lied_to(words, [null.fileno()] * 8)
            assert len(os.listdir("/proc/self/fd")) <= held + 1

    asyncio.run(main())


def test_noise_ends_in_errors_only() -> None:
    faults: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        draw = random.Random(0)
        for _ in range(200):
            words = b"".join(
                frame(draw.choice(list(Frame)), draw.randrange(4), draw.randbytes(draw.choice((0, 1, 4, 8, 32, 90))))
                for _ in range(draw.randrange(1, 6))
            )
            await lied_to(words, [])

    asyncio.run(main())
    assert faults == []
