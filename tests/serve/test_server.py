"""The server's life: the address it takes, and its end."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest
from serve_pieces import ScriptedEngine, say, served, serving

from tandem.core.errors import ConfigError
from tandem.serve.openai import make_app
from tandem.serve.server import KEEP_ALIVE_S, serve_forever


def test_a_taken_port_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        app = make_app(served(ScriptedEngine(lambda _: say("x"))))
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1:"):
            asyncio.run(serve_forever(app, host="127.0.0.1", port=taken.getsockname()[1], on_ready=print))


def test_cancelling_ends_running_requests_and_frees_the_port():
    async def run():
        engine = ScriptedEngine(lambda _: say("A" * 1500), step_s=0.02)
        async with httpx.AsyncClient(timeout=300) as plain, asyncio.timeout(30):
            async with serving(served(engine)) as address:
                body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
                going = asyncio.ensure_future(plain.post(f"{address}/v1/chat/completions", json=body))
                while not engine.running:
                    await asyncio.sleep(0.01)
                start = time.perf_counter()
            took_s = time.perf_counter() - start
            going.cancel()
            await asyncio.wait([going])
        return engine.running, took_s, address

    running, took_s, address = asyncio.run(run())
    assert not running and took_s < 15
    with socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1]))):
        pass


def test_clients_give_an_idle_connection_up_before_the_server_does():
    """Who closes a connection that the other may use at that moment loses a request. Their own defaults count."""
    assert httpx.Limits().keepalive_expiry < KEEP_ALIVE_S / 2

    async def run():
        async with serving(served(ScriptedEngine(lambda _: say("x")))) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
            ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            writer.write(ask)
            await reader.readuntil(b"}")
            await asyncio.sleep(httpx.Limits().keepalive_expiry + 0.5)
            assert not reader.at_eof()
            writer.write(ask)
            answer = await reader.readuntil(b"}")
            writer.close()
            return answer

    assert b"200 OK" in asyncio.run(asyncio.wait_for(run(), 30))
