"""The kernel's events before content is read: who reads a file waits until we have put its bytes there.

Owns: the system calls and the layout of events. Refuses: kernels without them (before 6.14), other than root.
Source: Linux include/uapi/linux/fanotify.h; fanotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRE_CONTENT, CLOEXEC = 0x8, 0x1
MARK_ADD, MARK_REMOVE = 0x1, 0x2
PRE_ACCESS = 0x00100000
AT_FDCWD = -100
ALLOW, DENY = 1, 2
REFUSE = DENY | errno.EIO << 24
RANGE_RECORD = 6
METADATA = struct.Struct("<IBBHQii")
RECORD = struct.Struct("<BBH")
RANGE = struct.Struct("<IQQ")
EVENTS_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Access:
    """Somebody is about to touch ``count`` bytes at ``offset``; it waits for an answer. ``descriptor`` may be written
    without raising events, and is ours to close."""

    descriptor: int
    pid: int
    offset: int
    count: int


def open_group() -> int:
    """A descriptor of a new group. Raises OSError."""
    return _checked(_libc().fanotify_init(PRE_CONTENT | CLOEXEC, os.O_RDWR | os.O_CLOEXEC | os.O_LARGEFILE))


def mark(group: int, path: Path, *, remove: bool = False) -> None:
    """Watch a file. Only who opens it afterwards is watched. Raises OSError."""
    flags = MARK_REMOVE if remove else MARK_ADD
    _checked(_libc().fanotify_mark(
        group, ctypes.c_uint(flags), ctypes.c_uint64(PRE_ACCESS), AT_FDCWD, os.fsencode(path)
    ))


def read_events(group: int) -> Iterator[Access]:
    """What waits now; blocks until something does."""
    data = os.read(group, EVENTS_BYTES)
    position = 0
    while position < len(data):
        length, _, _, head, _, descriptor, pid = METADATA.unpack_from(data, position)
        offset, count = 0, 1 << 62  # no range said: all of it
        place = position + head
        while place < position + length:
            kind, _, size = RECORD.unpack_from(data, place)
            if kind == RANGE_RECORD:
                _, offset, count = RANGE.unpack_from(data, place + RECORD.size)
            place += size
        position += length
        if descriptor >= 0:
            yield Access(descriptor, pid, offset, count)


def answer(group: int, access: Access, *, allow: bool) -> None:
    """Let the reader go on, or fail with EIO; closes the event's descriptor."""
    try:
        _respond(group, access.descriptor, ALLOW if allow else REFUSE)
    finally:
        os.close(access.descriptor)


def refuse_taken(group: int) -> None:
    """Fail every reader whose event a process took that has died since: the kernel knows an event that was taken by
    the number of its descriptor there, and keeps its reader waiting for as long as the group is open."""
    for number in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        _respond(group, number, REFUSE)


def _respond(group: int, number: int, code: int) -> None:
    try:
        os.write(group, struct.pack("<iI", number, code))
    except OSError as error:
        if error.errno != errno.ENOENT:  # no such event, or its reader was killed meanwhile
            raise


@functools.lru_cache(maxsize=8)
def can_watch(place: Path) -> str:
    """'' when files in a folder can be watched before they are read, else why not."""
    try:
        group = open_group()
        try:
            with tempfile.NamedTemporaryFile(dir=place, prefix=".probe-") as file:
                mark(group, Path(file.name))
        finally:
            os.close(group)
    except OSError as error:
        return f"{error.strerror} (needs root, Linux 6.14, and ext4, xfs or btrfs)"
    return ""


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
