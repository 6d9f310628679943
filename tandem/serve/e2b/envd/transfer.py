"""``/files``: whole files in and out of a box, by path, in one request.

Owns: bodies (raw or multipart, gzip or not), the words of ``path`` and ``username``. Refuses: a file larger than
``MAX_FILE_BYTES``. Invariant: no file is held in memory; an upload waits on disk until it is whole, so one that breaks
off writes nothing, and one larger than allowed neither.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import IO

from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tandem.sandbox.backend import HOME
from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.faults import CLIENT_CLOSED, Fault, json_response

MAX_FILE_BYTES = 8 * 2**30
MEMORY_BYTES = 2**20  # of an upload; what is larger waits on disk
PART_BYTES = 2**18
MAX_FILES = 1000  # of one request


async def answer_files(entry: Entry, request: Request, user: str) -> Response:
    """GET gives a file, POST (or PUT) writes one or several.

    Raises:
        Fault: no path, too large, a bad body. OSError: as the file system says.
    """
    path = request.query_params.get("path", "")
    if request.method in ("GET", "HEAD"):
        if not path:
            raise Fault(400, "path is missing")
        parts = await entry.files.read(path, user=user)
        name = PurePosixPath(path).name.replace('"', "").replace("\\", "")
        shown = name.encode("ascii", "replace").decode()
        headers = {"content-disposition": f'inline; filename="{shown}"'}
        if request.method == "HEAD":
            await parts.aclose()
            return Response(media_type="application/octet-stream", headers=headers)
        return Download(parts, media_type="application/octet-stream", headers=headers)
    if request.method not in ("POST", "PUT"):
        raise Fault(405, f"{request.method} of /files")
    try:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind == "multipart/form-data":
            written = await _write_form(entry, request, path, user)
        else:
            if not path:
                raise Fault(400, "path is missing")
            with SpooledTemporaryFile(MEMORY_BYTES) as kept:
                await _keep(request, kept)
                await entry.files.write(path, _parts(kept), user=user)
            written = [path]
    except ClientDisconnect:
        raise Fault(CLIENT_CLOSED, "the upload broke off; nothing was written") from None
    return json_response([_info(one) for one in written])


async def _write_form(entry: Entry, request: Request, path: str, user: str) -> list[str]:
    """Every part named ``file``: to ``path`` if there is one, else to the part's own file name."""
    async with _bounded(request).form(max_files=MAX_FILES, max_fields=MAX_FILES) as form:
        parts = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
        if not parts:
            raise Fault(400, "no file in the form")
        if path and len(parts) > 1:
            raise Fault(400, f"{len(parts)} files for one path")
        written = []
        for part in parts:
            target = path or part.filename or ""
            if not target:
                raise Fault(400, "a file without a name")
            if (part.size or 0) > MAX_FILE_BYTES:
                raise Fault(413, f"{target} is larger than {MAX_FILE_BYTES} bytes")
            await entry.files.write(target, _parts(part.file), user=user)
            written.append(target)
    return written


def _bounded(request: Request) -> Request:
    """The same, of which no more is taken than one file may have: a form waits on this machine's disk."""
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        message = await request.receive()
        taken += len(message.get("body", b""))
        if taken > MAX_FILE_BYTES:
            raise Fault(413, f"the files are larger than {MAX_FILE_BYTES} bytes")
        return message

    return Request(request.scope, receive)


async def _keep(request: Request, kept: IO[bytes]) -> None:
    """The whole body, unpacked, into ``kept``."""
    encoding = request.headers.get("content-encoding", "")
    if encoding not in ("", "identity", "gzip"):
        raise Fault(415, f"cannot read the encoding {encoding[:20]!r}: identity and gzip are known")
    inflater = zlib.decompressobj(16 + zlib.MAX_WBITS) if encoding == "gzip" else None
    size = 0
    async for part in request.stream():
        while part:
            try:
                plain = inflater.decompress(part, PART_BYTES) if inflater else part
            except zlib.error as error:
                raise Fault(400, f"the body is no gzip: {error}") from error
            part = inflater.unconsumed_tail if inflater else b""
            size += len(plain)
            if size > MAX_FILE_BYTES:
                raise Fault(413, f"the file is larger than {MAX_FILE_BYTES} bytes")
            await asyncio.to_thread(kept.write, plain) if size > MEMORY_BYTES else kept.write(plain)
    if inflater and not inflater.eof:
        raise Fault(400, "the gzip body breaks off")


async def _parts(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0)
    while part := await asyncio.to_thread(file.read, PART_BYTES):
        yield part


class Download(StreamingResponse):
    """Its parts are closed with it: also when its client leaves before it has begun."""

    def __init__(self, parts: AsyncGenerator[bytes, None], *, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(parts, media_type=media_type, headers=headers)
        self._source = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


def _info(path: str) -> dict[str, str]:
    whole = path if path.startswith("/") else f"{HOME}/{path}"
    return {"name": PurePosixPath(whole).name, "type": "file", "path": whole}
