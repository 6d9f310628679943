"""The body of a request, read to its end whatever becomes of the request.

Owns: the largest body, and what is done with one that nobody wants: a connection with half a body in it is of no use to
the client's next request, and one that is closed with unread bytes in it takes the answer back.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from tandem.serve.requests import BadRequest

MAX_BODY_BYTES = 32 * 2**20
MOST_UNWANTED_BYTES, UNWANTED_S = 4 * MAX_BODY_BYTES, 30.0
_IS_READ = "tandem.body_is_read"


class _Left(Exception):
    """The client is gone."""


async def whole_body(request: Request) -> bytes:
    """Raises ``BadRequest``: too large (413), or the client left."""
    data = bytearray()
    try:
        while (part := await _next(request)) is not None:
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    except _Left as error:
        raise BadRequest("the client left before its body was whole", status=499) from error
    return bytes(data)


async def read_away(request: Request) -> bool:
    """Read what is left of the body, if anything; False where it is too much or does not come, so that the connection
    must be closed."""
    seen = 0
    try:
        async with asyncio.timeout(UNWANTED_S):
            while (part := await _next(request)) is not None:
                seen += len(part)
                if seen > MOST_UNWANTED_BYTES:
                    return False
    except (TimeoutError, _Left):
        return False
    return True


async def _next(request: Request) -> bytes | None:
    """The next part of the body; None at its end."""
    if request.scope.get(_IS_READ):
        return None
    message = await request.receive()
    if message["type"] == "http.disconnect":
        request.scope[_IS_READ] = True
        raise _Left
    request.scope[_IS_READ] = not message.get("more_body", False)
    return message.get("body", b"")
