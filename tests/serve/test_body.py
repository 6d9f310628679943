"""Bodies that nobody wants: the answer arrives, and the connection serves the next request."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from serve_pieces import ScriptedEngine, say, served, serving

from tandem.serve.body import MAX_BODY_BYTES

GOOD = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
BIG = b"x" * 10_000_000


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length:")[1].split("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


def request(path: str, body: bytes, key: str = "k") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("path", "key", "body", "status"),
    [
        ("/v1/chat/completions", "wrong", BIG, 401),
        ("/nowhere", "k", BIG, 404),
        ("/v1/models", "k", BIG, 405),
        ("/v1/chat/completions", "k", BIG, 400),
        ("/v1/chat/completions", "k", b"x" * (MAX_BODY_BYTES + 3_000_000), 413),
    ],
)
def test_a_refused_body_is_read_before_the_answer_and_its_connection_goes_on(path, key, body, status):
    """The client sends half, then waits long after the server could have answered, then sends the rest."""

    async def run():
        async with serving(served(ScriptedEngine(lambda _: say("hello")), keys=("k",))) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
            data = request(path, body, key)
            writer.write(data[: len(data) // 2])
            await writer.drain()
            early = asyncio.ensure_future(read_reply(reader))
            await asyncio.wait([early], timeout=0.2)
            was_early = early.done()
            writer.write(data[len(data) // 2 :])
            await writer.drain()
            refused = await early
            writer.write(request("/v1/chat/completions", json.dumps(GOOD).encode()))
            answered = await read_reply(reader)
            writer.close()
            return was_early, refused, answered

    was_early, refused, answered = asyncio.run(asyncio.wait_for(run(), 30))
    assert not was_early and refused[0] == status and "error" in json.loads(refused[1])
    assert answered[0] == 200 and json.loads(answered[1])["choices"][0]["message"]["content"] == "hello"


def test_a_body_without_an_end_is_refused_and_its_connection_closed():
    async def run():
        async def endless():
            while True:
                yield BIG

        async with (
            serving(served(ScriptedEngine(lambda _: say("hello")))) as address,
            httpx.AsyncClient(base_url=address, timeout=30) as client,
        ):
            try:
                refused = (await client.post("/v1/chat/completions", content=endless())).status_code
            except httpx.TransportError:  # it sends into a closed connection, and its system may tell it so first
                refused = 413
            return refused, (await client.post("/v1/chat/completions", json=GOOD)).status_code

    assert asyncio.run(asyncio.wait_for(run(), 30)) == (413, 200)
