"""Errors as E2B clients read them: a status, a code and a sentence.

Owns: which of our errors becomes which HTTP status, and which Connect code. Refuses: to show what an unexpected
exception says; its text goes to the log.
"""

from __future__ import annotations

import errno
import logging
from enum import StrEnum

import msgspec
from starlette.responses import Response

from tandem.core.errors import (
    ConfigError,
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SandboxUnavailable,
    TandemError,
)

log = logging.getLogger(__name__)
CLIENT_CLOSED = 499


class Code(StrEnum):
    """Codes of the Connect protocol that we use."""

    CANCELED = "canceled"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    UNAUTHENTICATED = "unauthenticated"


HTTP_STATUS = {
    Code.CANCELED: CLIENT_CLOSED, Code.INVALID_ARGUMENT: 400, Code.DEADLINE_EXCEEDED: 504, Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409, Code.PERMISSION_DENIED: 403, Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400, Code.UNIMPLEMENTED: 501, Code.INTERNAL: 500, Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}  # fmt: skip


class Fault(Exception):
    """A request that cannot be answered as asked. ``status`` is for plain HTTP, ``code`` for Connect calls."""

    def __init__(self, status: int, message: str, *, code: Code | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or _CODE_OF_STATUS.get(status, Code.INTERNAL)


_CODE_OF_STATUS = {
    400: Code.INVALID_ARGUMENT, 401: Code.UNAUTHENTICATED, 403: Code.PERMISSION_DENIED, 404: Code.NOT_FOUND,
    409: Code.ALREADY_EXISTS, 413: Code.RESOURCE_EXHAUSTED, 415: Code.UNIMPLEMENTED, 429: Code.RESOURCE_EXHAUSTED,
    CLIENT_CLOSED: Code.CANCELED, 501: Code.UNIMPLEMENTED, 502: Code.UNAVAILABLE, 503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED, 507: Code.RESOURCE_EXHAUSTED,
}  # fmt: skip


def not_found(sandbox_id: str) -> Fault:
    return Fault(404, f"sandbox {sandbox_id} was not found")


def not_running(sandbox_id: str) -> Fault:
    """What traffic to a box that is gone (or paused, without auto-resume) gets; clients look for these words."""
    return Fault(502, f"the sandbox {sandbox_id} was not found")


def port_closed(sandbox_id: str, port: int) -> Fault:
    return Fault(502, f"the sandbox {sandbox_id} is running but port is not open: nothing listens on {port}")


def fault_of(error: BaseException) -> Fault:
    """Any exception as a fault."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, TandemError):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        return Fault(_status_of(error), message)
    if isinstance(error, OSError) and error.errno is not None:
        status, code = _OF_ERRNO.get(error.errno, (500, Code.INTERNAL))
        where = f"{error.filename}: " if error.filename else ""
        return Fault(status, f"{where}{error.strerror}", code=code)
    if isinstance(error, (ValueError, msgspec.ValidationError)):
        return Fault(400, str(error))
    if isinstance(error, TimeoutError):
        return Fault(504, str(error) or "not done in time")
    log.error("request failed", exc_info=error)
    return Fault(500, f"internal error: {type(error).__name__}")


_OF_ERRNO = {
    errno.ENOENT: (404, Code.NOT_FOUND), errno.EEXIST: (409, Code.ALREADY_EXISTS),
    errno.EACCES: (403, Code.PERMISSION_DENIED), errno.EPERM: (403, Code.PERMISSION_DENIED),
    errno.EROFS: (403, Code.PERMISSION_DENIED), errno.ENOTDIR: (400, Code.INVALID_ARGUMENT),
    errno.EISDIR: (400, Code.INVALID_ARGUMENT), errno.EINVAL: (400, Code.INVALID_ARGUMENT),
    errno.ELOOP: (400, Code.INVALID_ARGUMENT), errno.ENAMETOOLONG: (400, Code.INVALID_ARGUMENT),
    errno.ENOTEMPTY: (409, Code.FAILED_PRECONDITION), errno.ENOSPC: (507, Code.RESOURCE_EXHAUSTED),
    errno.EDQUOT: (507, Code.RESOURCE_EXHAUSTED), errno.EFBIG: (413, Code.RESOURCE_EXHAUSTED),
    errno.ECONNREFUSED: (502, Code.UNAVAILABLE), errno.ENOEXEC: (400, Code.INVALID_ARGUMENT),
}  # fmt: skip


def _status_of(error: TandemError) -> int:
    match error:
        case ConfigError() | SandboxUnavailable():
            return 400
        case SandboxGone():
            return 404
        case SandboxTimeout():
            return 504
        case SandboxError():
            return 409
        case _:
            return 500


def json_response(body: object, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def fault_response(fault: Fault) -> Response:
    """An error of the control plane, ``/files`` and the proxy."""
    return json_response({"code": fault.status, "message": fault.message}, fault.status)


def connect_error(fault: Fault) -> dict[str, object]:
    """An error of a Connect call."""
    return {"code": fault.code.value, "message": fault.message}
