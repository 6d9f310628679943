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
from tandem.serve.server import serve_forever


def test_a_taken_port_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        app = make_app(served(ScriptedEngine(lambda _: say("x"))))
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1:"):
            asyncio.run(serve_forever(app, host="127.0.0.1", port=taken.getsockname()[1], on_ready=print))


def test_cancelling_ends_running_requests_and_frees_the_port():
    async def run():
        engine = ScriptedEngine(lambda _: say("A" * 1500), step_s=0.02)
        async with httpx.AsyncClient(timeout=20) as plain, asyncio.timeout(20):
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
    assert not running and took_s < 5
    with socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1]))):
        pass
