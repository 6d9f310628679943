"""One HTTP exchange that lasts as long as its client listens.

Owns: the answer's transport, JSON or server-sent events, and the end of the work when the client goes away.
Invariant: no work goes on for a client that has disconnected; an error before the first byte has its own status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.core.errors import ConfigError, PromptTooLong, TandemError
from tandem.serve.requests import BadRequest

log = logging.getLogger(__name__)
Emit = Callable[[object], None]


def json_response(body: object, status: int = 200, *, close: bool = False) -> Response:
    """``close``: the connection is of no more use to the client."""
    headers = {"connection": "close"} if close else None
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """An error as OpenAI clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception, path: str) -> tuple[int, dict[str, object]]:
    """Status and body of an error: the client's own is 4xx, the engine's 503, anything else 500 (and in the log).

    ``path`` is the request's: it tells in which field the client gave what the model could not read.
    """
    if isinstance(error, BadRequest):
        body = error_body(error.message, kind="invalid_request_error", param=error.param, code=error.code)
        return error.status, body
    if isinstance(error, PromptTooLong | ConfigError):  # ConfigError: the chat template refuses the conversation
        field = "prompt" if path.endswith("/completions") and not path.endswith("/chat/completions") else "messages"
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return 400, error_body(f"{field}: {error.message}", kind="invalid_request_error", param=field, code=code)
    if isinstance(error, TandemError):
        return 503, error_body(error.message, kind="engine_error")
    log.error("request failed", exc_info=error)
    return 500, error_body(f"internal error: {type(error).__name__}", kind="internal_error")


class Exchange:
    """A response that runs ``work`` and sends what it returns (JSON) or, when ``stream`` is set, what it emits.

    Used as the return value of an endpoint.
    """

    def __init__(self, work: Callable[[Emit], Awaitable[object]], *, stream: bool) -> None:
        self._work = work
        self._stream = stream
        self._items: asyncio.Queue[object] = asyncio.Queue()  # at most the pieces of one answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = asyncio.ensure_future(self._exchange(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({exchange, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            exchange.cancel()
            with suppress(asyncio.CancelledError, OSError):  # OSError: the client left in the middle of a write
                await exchange

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(self._items.put_nowait))
        try:
            if self._stream:
                await self._send_events(work, scope, receive, send)
            else:
                await (await self._outcome(work, scope))(scope, receive, send)
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    async def _outcome(self, work: Awaitable[object], scope: Scope) -> Response:
        try:
            return json_response(await work)
        except Exception as error:  # the boundary to the client: every error becomes a status and a sentence
            status, body = describe(error, scope["path"])
            return json_response(body, status)

    async def _send_events(self, work: asyncio.Future[object], scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._next(work)
        if first is None and work.exception() is not None:
            await (await self._outcome(work, scope))(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        item = first
        while item is not None:
            await _send_event(send, msgspec.json.encode(item))
            item = await self._next(work)
        if (error := work.exception()) is None:
            await _send_event(send, b"[DONE]")
        else:
            assert isinstance(error, Exception)
            await _send_event(send, msgspec.json.encode(describe(error, scope["path"])[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, work: asyncio.Future[object]) -> object | None:
        """The next emitted item; None when the work is done and nothing is left."""
        while self._items.empty():
            if work.done():
                return None
            item = asyncio.ensure_future(self._items.get())
            try:
                await asyncio.wait({item, work}, return_when=asyncio.FIRST_COMPLETED)
                if item.done():
                    return item.result()
            finally:
                item.cancel()
        return self._items.get_nowait()


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
