"""Runs an application on a port until it is told to stop.

Owns: the socket and the server's life inside the caller's event loop. Refuses: signals of its own; cancel the task.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from tandem.core.errors import ConfigError

# Longer than clients keep a connection that they may use again (httpx: 5 s): who closes first must be the client, or
# a request meets a connection that is closed at that moment and is lost.
KEEP_ALIVE_S = 75.0
CLOSE_S = 2.0  # after a cancellation, open connections get this long


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self):
        """The process's signals belong to who started the server."""
        yield


async def serve_forever(app: ASGIApp, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until cancelled; ``on_ready`` gets the base address (port 0 picks a free one).

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}",
                          hint="choose another --port; 0 takes a free one") from error  # fmt: skip
    # Accepted connections inherit it; without it every streamed piece waits for the acknowledgement of the last.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listening:
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(CLOSE_S),
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            shown = f"[{host}]" if ":" in host else host
            on_ready(f"http://{shown}:{listening.getsockname()[1]}")
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            with suppress(TimeoutError):
                await asyncio.wait_for(serving, 2 * CLOSE_S)
