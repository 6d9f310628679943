"""The process above a reward worker: it runs no reward, so nothing can make it deaf.

Owns: the end of everything that a worker started, wherever it went: what leaves the worker's session or outlives
its parent becomes a child of the guard (a subreaper), and is found there. Refuses: frames (``reward_worker``).
Invariants: when the guard ends on its own, none of its descendants is left; it ends when the pool says so, when the
worker ends, and when the pool's process dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HEARD = {signal.SIGTERM, signal.SIGCHLD}
_END_S = 5.0  # a fork bomb could go on for ever
_SCAN_S = 0.002


def guarded() -> bool:
    """Split in two: True in the child, which is to work; the parent stays here until all is over. False where the
    pool's process died before the kernel was told."""
    pool = os.getppid()
    _tie(signal.SIGTERM)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != pool:
        return False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    guard = os.getpid()
    worker = os.fork()
    if worker:
        _guard(worker)
    _tie(signal.SIGKILL)
    os.setsid()  # a reward that signals its group does not reach the guard
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return os.getppid() == guard


def _tie(number: int) -> None:
    """To be sent ``number`` when the parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _guard(worker: int) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for pipe in (0, 1):  # the worker's alone: the pool has to see their end
        os.dup2(null, pipe)
    code = 128 + signal.SIGTERM
    while signal.sigwait(_HEARD) == signal.SIGCHLD:
        if (status := _reap().get(worker)) is not None:
            said = os.waitstatus_to_exitcode(status)
            code = said if said >= 0 else 128 - said
            break
    _end_descendants()
    os._exit(code)


def _reap() -> dict[int, int]:
    """How each dead child ended, orphans that came to us among them."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _end_descendants() -> None:
    """Stop all of them first, so that none starts another one, then kill; until two looks in a row find none (one look
    takes a while, and may miss who got another parent meanwhile)."""
    deadline, empty = time.monotonic() + _END_S, 0
    while empty < 2 and time.monotonic() < deadline:
        found: set[int] = set()
        while (new := _descendants() - found) and time.monotonic() < deadline:
            found |= new
            _send(new, signal.SIGSTOP)
        _send(found, signal.SIGKILL)
        _reap()
        empty = 0 if found else empty + 1
        if found:
            time.sleep(_SCAN_S)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants() -> set[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    dead: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent, *others = file.read().rpartition(b")")[2].split()
            parents[int(name)] = int(parent)
            if state in b"ZX" and int(others[15]) <= 1:  # a dead leader may have living threads
                dead.add(int(name))
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found - dead
