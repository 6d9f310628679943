"""What goes wrong between us and an E2B-compatible service, in our words.

Owns: the mapping of the SDK's exceptions. Invariant: a lost connection is never a result: whether the other side did
what it was asked is unknown, so it is told as ``SandboxGone`` and nothing is sent a second time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable, TandemError

NUMBERS = {os.strerror(number).lower(): number for number in errno.errorcode}
# Words of servers that are not the C library's.
SPOKEN = {"not found": errno.ENOENT, "does not exist": errno.ENOENT, "is a folder": errno.EISDIR,
          "disk is full": errno.ENOSPC}  # fmt: skip


def e2b() -> ModuleType:
    """E2B's SDK: imported at first use, because it is an extra."""
    import e2b as sdk
    import e2b.exceptions

    return sdk


@contextmanager
def remote_errors(what: str, *, lost: Callable[[str], None] = lambda why: None) -> Iterator[None]:
    """Ours pass unchanged. ``lost`` hears of a box that is dead or out of reach.

    Raises:
        SandboxGone: the box is dead, or the connection was lost. SandboxTimeout, SandboxUnavailable, SandboxError.
    """
    try:
        yield
    except (TandemError, TimeoutError):
        raise
    except Exception as error:
        raise _ours(error, what, lost) from error


def _ours(error: Exception, what: str, lost: Callable[[str], None]) -> TandemError:
    told = e2b().exceptions
    text = f"{what}: {error}"
    if isinstance(error, (told.SandboxNotRunningException, told.SandboxNotFoundException)):
        lost("it ended at its service")
        return SandboxGone(text, hint="it was killed or its lifetime ended; create a new one")
    if isinstance(error, told.AuthenticationException):
        return SandboxUnavailable(text, hint="the service does not take this key")
    if isinstance(error, told.ServiceBusyException):
        return SandboxTimeout(text, hint="the service has no room now; try again")
    if isinstance(error, told.TimeoutException) and not isinstance(error, told.SandboxUnreachableException):
        lost("its service did not answer in time")
        return SandboxTimeout(text, hint="the box is given up; create a new one")
    if isinstance(error, told.NotFoundException):
        return SandboxUnavailable(text, hint="the service has no such template")
    if isinstance(error, told.SandboxException) and not isinstance(error, told.SandboxUnreachableException):
        if getattr(error, "status_code", None) in (400, 404, 405, 501):
            return SandboxUnavailable(text, hint="the service cannot do that")
        return SandboxError(text)
    lost("the connection to it was lost")
    return SandboxGone(
        f"{what}: the connection to its service was lost ({type(error).__name__}: {error})",
        hint="what was under way may have been done, and is not done again; create a new one",
    )


def errno_of(text: str) -> int:
    """The number of the system's error that a message speaks of; EIO where it speaks of none."""
    low = text.lower()
    return next((number for words, number in {**NUMBERS, **SPOKEN}.items() if words in low), errno.EIO)
