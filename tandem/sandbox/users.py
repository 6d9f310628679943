"""Whose a command is: a box's own users, by name or number, as a Dockerfile's USER and E2B's clients name them.

Owns: the look-up in the box's own ``/etc/passwd`` and ``/etc/group``. Refuses: to look at the host's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import HOME, CallKind, Process, Start

AGENT_ID = 1000
AGENTS = ("", "agent", str(AGENT_ID), f"{AGENT_ID}:{AGENT_ID}")
ROOTS = ("root", "0", "0:0", "root:root")
MAX_GROUPS = 32
LIST_BYTES = 2**20  # of each of the two files
ROOT_ENVIRONMENT = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
Starter = Callable[[Start], Awaitable[Process]]


class NoSuchUser(SandboxError):
    """The box has no user of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """``user`` is what ``Start`` takes; ``environment`` what a command of this user finds unless it is told more."""

    user: str
    environment: dict[str, str]


async def as_user(start: Starter, asked: Start) -> Start:
    """The same command with its user as the box knows it. ``start`` starts a command in the box.

    Raises:
        NoSuchUser. SandboxError and its kin: the box's.
    """
    if asked.user in AGENTS:
        return replace(asked, user="agent")
    if asked.user in ROOTS:
        return replace(asked, user="root", environment={**ROOT_ENVIRONMENT, **asked.environment})
    found = identity(asked.user, await _list(start, "/etc/passwd"), await _list(start, "/etc/group"))
    folder = found.environment.get("HOME", HOME) if asked.folder == HOME else asked.folder  # which it may not enter
    return replace(asked, user=found.user, environment={**found.environment, **asked.environment}, folder=folder)


def identity(text: str, passwd: str, group: str) -> Identity:
    """``text`` is a name or number, with ``:`` and a group's if wanted; the rest is text of the two files.

    Raises:
        NoSuchUser: a name that is in none of them.
    """
    name, colon, wanted = text.partition(":")
    rows = [fields for line in passwd.splitlines() if len(fields := line.split(":")) >= 6 and fields[2].isdecimal()]
    groups = [fields for line in group.splitlines() if len(fields := line.split(":")) >= 4 and fields[2].isdecimal()]
    row = next((row for row in rows if row[0] == name), None)
    if row is None and name.isdecimal():
        row = next((row for row in rows if row[2] == name), [name, "", name, "0", "", "/"])
    if row is None and name == "user":  # what E2B calls the one of its templates
        return Identity(user="agent", environment={})
    if row is None:
        raise NoSuchUser(f"no user {name[:40]!r} in the box", hint="name one of its /etc/passwd, or a number")
    gid, more = row[3], [entry[2] for entry in groups if row[0] in entry[3].split(",")]
    if colon:
        gid = next((entry[2] for entry in groups if entry[0] == wanted), wanted)
        more = []
    if not gid.isdecimal():
        raise NoSuchUser(f"no group {wanted[:40]!r} in the box", hint="name one of its /etc/group, or a number")
    environment = {"HOME": row[5] or "/", "USER": row[0], "LOGNAME": row[0]}
    if row[2] == "0" and gid == "0":
        return Identity(user="root", environment=environment)
    numbers = [row[2], gid, *more[:MAX_GROUPS]]
    if any(int(number) > 65535 for number in numbers):
        raise NoSuchUser(f"user {text[:40]!r} has a number above 65535", hint="a box has no others")
    return Identity(user=":".join(numbers), environment=environment)


async def _list(start: Starter, path: str) -> str:
    """A file of the box; '' where it has none."""
    process = await start(Start(kind=CallKind.READ_PARTS, arguments=[path], folder="/", stdin=True, timeout_s=20))
    data = bytearray()
    try:
        await process.send_stdin(b"+")
    except SandboxError:  # it has ended: there is no such file
        return ""
    async for piece in process.output(from_start=True):
        data += piece.data if piece.stream == "stdout" else b""
        if len(data) >= LIST_BYTES:
            break
    await process.signal(9)
    return data[:LIST_BYTES].decode("utf-8", "replace")
