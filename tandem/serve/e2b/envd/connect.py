"""The Connect protocol over HTTP/1.1, in JSON: unary calls, streams of the server, streams of the client.

Framing and codes: https://connectrpc.com/docs/protocol. Owns: bodies, envelopes, deadlines, errors. Refuses: protobuf
bodies, and the verbs themselves. Invariant: a stream that failed ends in an error, never like one that is complete;
a client that leaves ends the stream and nothing else.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Send

from tandem.serve.e2b.faults import HTTP_STATUS, Code, Fault, connect_error, fault_of, json_response

UNARY_TYPE, STREAM_TYPE = "application/json", "application/connect+json"
COMPRESSED, END_STREAM = 1, 2
MAX_MESSAGE_BYTES = 16 * 2**20
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Around a message: ``timeout_s`` is the client's deadline (None: no end), ``user`` whom it wants to be."""

    headers: Headers
    timeout_s: float | None
    user: str
    keepalive_s: float


Unary = Callable[[Call, Message], Awaitable[Message]]
ServerStream = Callable[[Call, Message], AsyncIterator[Message]]
ClientStream = Callable[[Call, AsyncIterator[Message]], Awaitable[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The methods of one service by name."""

    unary: Mapping[str, Unary]
    server_stream: Mapping[str, ServerStream]
    client_stream: Mapping[str, ClientStream]


async def answer(service: Service, method: str, request: Request, user: str, send: Send) -> None:
    """Answer one call of ``service``."""
    receive, scope = request.receive, request.scope
    try:
        if request.method != "POST":
            raise Fault(405, f"{method} is called with POST", code=Code.UNIMPLEMENTED)
        call = _read_call(request.headers, user)
        if (one := service.unary.get(method)) is not None:
            _want_type(request.headers, UNARY_TYPE)
            message = _decode(_decompressed(await _body(request), request.headers.get("content-encoding", "")))
            reply = await _within(call.timeout_s, one(call, message), method)
            await json_response(reply)(scope, receive, send)
            return
        _want_type(request.headers, STREAM_TYPE)
    except Exception as error:  # the boundary to the client: every error becomes a status and a sentence
        fault = fault_of(error)
        status = fault.status if fault.status in (405, 415, 502) else HTTP_STATUS[fault.code]
        await json_response(connect_error(fault), status)(scope, receive, send)
        return
    if (many := service.server_stream.get(method)) is not None:
        await _serve_stream(many, call, request, send)
    elif (taken := service.client_stream.get(method)) is not None:
        await _take_stream(taken, call, method, request, send)
    else:
        fault = Fault(404, f"no method {method}", code=Code.UNIMPLEMENTED)
        await json_response(connect_error(fault), 404)(scope, receive, send)


async def with_keepalive(source: AsyncIterator[Message], every_s: float, sign: Message) -> AsyncIterator[Message]:
    """What ``source`` gives, and ``sign`` whenever it gave nothing for ``every_s`` seconds."""
    coming: asyncio.Future[Message] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(source))  # type: ignore[arg-type]
            await asyncio.wait({coming}, timeout=every_s)
            if not coming.done():
                yield sign
                continue
            ready, coming = coming, None
            try:
                yield ready.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming


# ---- streams of the server


async def _serve_stream(method: ServerStream, call: Call, request: Request, send: Send) -> None:
    try:  # the whole request first: some clients stop sending it when an answer begins
        messages = [message async for message in _envelopes(request)]
        if len(messages) != 1:
            raise Fault(400, f"one message was expected, {len(messages)} came")
    except Fault as fault:
        await _begin_stream(send)
        ending = _envelope(END_STREAM, {"error": connect_error(fault)})
        await send({"type": "http.response.body", "body": ending, "more_body": False})
        return
    await _begin_stream(send)
    speaking = asyncio.ensure_future(_speak(method(call, messages[0]), send))
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({speaking, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        speaking.cancel()
        with suppress(asyncio.CancelledError, OSError):  # OSError: the client left in the middle of a write
            await speaking


async def _speak(source: AsyncIterator[Message], send: Send) -> None:
    ending: Message = {}
    try:
        async for message in source:
            await send({"type": "http.response.body", "body": _envelope(0, message), "more_body": True})
    except Exception as error:  # the boundary to the client
        ending = {"error": connect_error(fault_of(error))}
    await send({"type": "http.response.body", "body": _envelope(END_STREAM, ending), "more_body": False})


async def _take_stream(method: ClientStream, call: Call, name: str, request: Request, send: Send) -> None:
    ending: Message = {}
    body = b""
    try:
        body = _envelope(0, await _within(call.timeout_s, method(call, _envelopes(request)), name))
    except Exception as error:  # the boundary to the client
        ending = {"error": connect_error(fault_of(error))}
    await _begin_stream(send)
    await send({"type": "http.response.body", "body": body + _envelope(END_STREAM, ending), "more_body": False})


async def _begin_stream(send: Send) -> None:
    headers = [(b"content-type", STREAM_TYPE.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- messages


def _envelope(flags: int, message: Message) -> bytes:
    data = msgspec.json.encode(message)
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


async def _envelopes(request: Request) -> AsyncIterator[Message]:
    """The messages of a streaming body, as they come."""
    encoding = request.headers.get("connect-content-encoding", "")
    held = bytearray()
    async for part in request.stream():
        held += part
        while len(held) >= 5:
            size = int.from_bytes(held[1:5], "big")
            if size > MAX_MESSAGE_BYTES:
                raise Fault(413, f"a message of {size} bytes is larger than {MAX_MESSAGE_BYTES}")
            if len(held) < 5 + size:
                break
            flags, data = held[0], bytes(held[5 : 5 + size])
            del held[: 5 + size]
            yield _decode(_decompressed(data, encoding if flags & COMPRESSED else ""))
    if held:
        raise Fault(400, "the body ends in the middle of a message")


def _decode(data: bytes) -> Message:
    try:
        return msgspec.json.decode(data or b"{}", type=Message)
    except msgspec.DecodeError as error:
        raise Fault(400, f"the body is no JSON object: {error}") from error


def _decompressed(data: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return data
    if encoding != "gzip":
        raise Fault(415, f"cannot read the encoding {encoding[:20]!r}: identity and gzip are known")
    try:
        inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        plain = inflater.decompress(data, MAX_MESSAGE_BYTES)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise Fault(400, f"the body is no gzip: {error}") from error
    if inflater.unconsumed_tail:
        raise Fault(413, f"a message is larger than {MAX_MESSAGE_BYTES} bytes")
    return plain


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_MESSAGE_BYTES:
            raise Fault(413, f"the body is larger than {MAX_MESSAGE_BYTES} bytes")
    return bytes(data)


# ---- around them


def _read_call(headers: Headers, user: str) -> Call:
    timeout = headers.get("connect-timeout-ms", "")
    if timeout and not timeout.isdecimal():
        raise Fault(400, f"Connect-Timeout-Ms: {timeout[:20]!r} is no number")
    ping = headers.get("keepalive-ping-interval", "")
    return Call(
        headers=headers,
        timeout_s=int(timeout) / 1000 if timeout else None,
        user=user,
        keepalive_s=max(1.0, float(ping)) if ping.isdecimal() else 90.0,
    )


def _want_type(headers: Headers, wanted: str) -> None:
    given = headers.get("content-type", "").partition(";")[0].strip()
    if given != wanted:
        raise Fault(415, f"content type {given[:60]!r}: {wanted} is what this method takes", code=Code.UNIMPLEMENTED)


async def _within(timeout_s: float | None, work: Awaitable[Message], what: str) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        if timeout_s is None:
            raise
        raise Fault(504, f"{what} was not done in {timeout_s:g} s") from error


