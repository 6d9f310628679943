"""``/files``: whole files in and out of a box, by path, in one request.

Owns: bodies (raw or multipart, gzip or not), the words of ``path`` and ``username``. Refuses: to hold a file that is
larger than ``MAX_FILE_BYTES``. Invariant: an upload that breaks off writes nothing; one larger than allowed neither.
"""

from __future__ import annotations

import zlib
from pathlib import PurePosixPath

from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tandem.sandbox.backend import HOME
from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.faults import CLIENT_CLOSED, Fault, json_response

MAX_FILE_BYTES = 512 * 2**20
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
        data = await entry.files.read(path, max_bytes=MAX_FILE_BYTES, user=user)
        name = PurePosixPath(path).name.replace('"', "").replace("\\", "")
        shown = name.encode("ascii", "replace").decode()
        headers = {"content-disposition": f'inline; filename="{shown}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)
    if request.method not in ("POST", "PUT"):
        raise Fault(405, f"{request.method} of /files")
    try:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind == "multipart/form-data":
            written = await _write_form(entry, request, path, user)
        else:
            if not path:
                raise Fault(400, "path is missing")
            data = _plain(await _body(request), request.headers.get("content-encoding", ""))
            await entry.files.write(path, data, user=user)
            written = [path]
    except ClientDisconnect:
        raise Fault(CLIENT_CLOSED, "the upload broke off; nothing was written") from None
    return json_response([_info(one) for one in written])


async def _write_form(entry: Entry, request: Request, path: str, user: str) -> list[str]:
    """Every part named ``file``: to ``path`` if there is one, else to the part's own file name."""
    async with request.form(max_files=MAX_FILES, max_fields=MAX_FILES) as form:
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
            await entry.files.write(target, await part.read(), user=user)
            written.append(target)
    return written


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_FILE_BYTES:
            raise Fault(413, f"the file is larger than {MAX_FILE_BYTES} bytes")
    return bytes(data)


def _plain(data: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return data
    if encoding != "gzip":
        raise Fault(415, f"cannot read the encoding {encoding[:20]!r}: identity and gzip are known")
    inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        plain = inflater.decompress(data, MAX_FILE_BYTES)
    except zlib.error as error:
        raise Fault(400, f"the body is no gzip: {error}") from error
    if inflater.unconsumed_tail:
        raise Fault(413, f"the file is larger than {MAX_FILE_BYTES} bytes")
    if not inflater.eof:
        raise Fault(400, "the gzip body breaks off")
    return plain


def _info(path: str) -> dict[str, str]:
    whole = path if path.startswith("/") else f"{HOME}/{path}"
    return {"name": PurePosixPath(whole).name, "type": "file", "path": whole}
