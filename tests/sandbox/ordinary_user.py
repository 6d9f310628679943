"""Run a part of a test without privileges."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

ORDINARY_USER = 1000


def as_ordinary_user(run: Callable[[], None]) -> None:
    """Run in a child without privileges; its failure is ours."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            os.setresuid(ORDINARY_USER, ORDINARY_USER, ORDINARY_USER)
            run()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, report
