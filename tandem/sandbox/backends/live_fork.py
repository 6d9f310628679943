"""What a live fork of the namespace backend needs, and what it refuses.

The one long-lived command of a box (an interpreter or a shell that waits for input) is copied while it runs: the
keeper makes it call ``clone``, in the way of a debugger, and gives the copy a box of its own (``native/branch.c``).
Variables, functions and memory survive, shared with the parent until one of them writes. Refused, each with its
reason: a command that works at the moment, has threads or children, shares memory, or holds files or sockets; a second
command in the box. A copy knows nothing of it: what its program seeded goes on as in its parent. Only its process
number differs, by which libraries tell and draw anew (shells remember theirs and keep it).

A copy lives in namespaces below its parent's, for the kernel knows no other place for it. So it ends when the parent's
agent dies; when the parent is killed, only its agent stays, stopped, until the last copy is gone. And code of the
parent, whose user owns those namespaces, has all powers over the commands of its copies, as a process over its forks
(not over their agents, whose program it cannot read); copies cannot see the parent or each other. A parent that must
not touch them is paused or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backend import CallKind
from tandem.sandbox.backends.keeper import Keeper, NotIdle, Pushed
from tandem.sandbox.backends.process import NamespaceProcess

PATIENCE_S = 2.0  # for a command that still works on its input
HINT = "fork without live (files only), or use the gvisor backend"
PR_GET_TID_ADDRESS = 40
NEEDED = 1 << 21 | 1 << 19  # CAP_SYS_ADMIN, CAP_SYS_PTRACE


@cache
def obstacle() -> str:
    """Why this machine cannot fork live; '' when it can."""
    if platform.machine() != "x86_64":
        return f"it is written for x86_64, and this is {platform.machine()}"
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    if int(status["CapEff"], 16) & NEEDED != NEEDED:
        return "it needs root (CAP_SYS_ADMIN and CAP_SYS_PTRACE)"
    if status.get("Seccomp", "0").strip() != "0":
        return "this process is under a seccomp filter itself"
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    if yama.exists() and yama.read_text().strip() == "3":
        return "this machine forbids all tracing (kernel.yama.ptrace_scope = 3)"
    address = ctypes.c_void_p()
    if ctypes.CDLL(None).prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0:
        return "the kernel was built without CONFIG_CHECKPOINT_RESTORE"
    return ""


def live_fork_works() -> bool:
    return os.name == "posix" and not obstacle()


def only_process(running: Sequence[NamespaceProcess]) -> NamespaceProcess:
    """The command that a live fork copies. Raises SandboxUnavailable: none, or several."""
    running = [process for process in running if process.start.kind is CallKind.RUN]
    if not running:
        raise SandboxUnavailable(
            "no live fork: no long-lived command runs in it", hint="start an interpreter or a shell with stdin first"
        )
    if len(running) > 1:
        names = ", ".join(f"{process.start.arguments[0]} ({process.pid})" for process in running)
        raise SandboxUnavailable(f"no live fork: it copies one command, and these run: {names}", hint=HINT)
    return running[0]


@contextlib.asynccontextmanager
async def stand_still(keeper: Keeper, number: int, process: NamespaceProcess) -> AsyncIterator[Pushed | None]:
    """The box does not move meanwhile; the layer that its new files became, to be released.

    Raises:
        SandboxUnavailable: what stands in the way. SandboxGone, SnapshotError.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_S
    async with contextlib.AsyncExitStack() as held:
        try:
            await held.enter_async_context(process.input_held(PATIENCE_S))
        except TimeoutError:
            raise SandboxUnavailable(
                f"no live fork: process {process.pid} does not read its stdin", hint=HINT
            ) from None
        while True:
            try:
                pushed = await keeper.still(number, process.pid)
                break
            except NotIdle as busy:
                if loop.time() > end:
                    raise SandboxUnavailable(f"no live fork: {busy.message}", hint=busy.hint) from None
                await asyncio.sleep(0.002)
        try:
            yield pushed
        finally:
            keeper.go_on(number)
