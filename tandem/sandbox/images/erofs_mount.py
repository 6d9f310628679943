"""Mounts EROFS files without a loop device and without a place: the mount is a file descriptor.

Owns: the system calls (through ctypes, since ``mount(8)`` of many systems still takes a loop device), and the probe
that says whether this process on this kernel may. A mount whose descriptor is closed is gone.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.images.erofs_writer import write_erofs
from tandem.sandbox.images.tree import Node, folder

FSOPEN, FSCONFIG, FSMOUNT = 430, 431, 432  # one number on every architecture
SET_STRING, CMD_CREATE = 1, 6
CLOEXEC, MOUNT_RDONLY, MOUNT_NODEV = 1, 1, 4


def mount_erofs(image: Path, *, device: Path | None = None) -> int:
    """A detached read-only mount as a descriptor of its root folder; close it to end it.

    Raises:
        OSError: the kernel refuses (before 6.12; the image on tmpfs; not privileged; a broken image).
    """
    context = _call(FSOPEN, b"erofs", CLOEXEC)
    try:
        _call(FSCONFIG, context, SET_STRING, b"source", os.fsencode(image), 0)
        if device is not None:
            _call(FSCONFIG, context, SET_STRING, b"device", os.fsencode(device), 0)
        _call(FSCONFIG, context, CMD_CREATE, None, None, 0)
        return _call(FSMOUNT, context, CLOEXEC, MOUNT_RDONLY | MOUNT_NODEV)
    finally:
        os.close(context)


def can_mount_index(place: Path) -> str:
    """'' when images with a tar beside them mount from ``place``, else why not."""
    return _probe(str(place), os.stat(place).st_dev)


@functools.lru_cache(maxsize=16)
def _probe(place: str, _device: int) -> str:
    image, device = Path(place, f".probe-{os.getpid()}.erofs"), Path(place, f".probe-{os.getpid()}.tar")
    root = folder()
    assert root.children is not None
    root.children[b"f"] = Node(mode=0o100644, size=3, offset=512)
    try:
        image.write_bytes(write_erofs(root, device_bytes=1024))
        device.write_bytes(bytes(512) + b"yes" + bytes(509))
        mount = mount_erofs(image, device=device)
        try:
            descriptor = os.open("f", os.O_RDONLY, dir_fd=mount)
            try:
                return "" if os.read(descriptor, 8) == b"yes" else "the kernel reads it wrongly"
            finally:
                os.close(descriptor)
        finally:
            os.close(mount)
    except OSError as error:
        return f"{error.strerror} (needs root, Linux 6.12 with EROFS, and a folder that is not on tmpfs)"
    finally:
        image.unlink(missing_ok=True)
        device.unlink(missing_ok=True)


def require_index(place: Path) -> None:
    """Raises SandboxUnavailable with the reason."""
    if problem := can_mount_index(place):
        raise SandboxUnavailable(f"EROFS files do not mount here: {problem}")


def _call(number: int, *arguments: object) -> int:
    converted = [ctypes.c_char_p(value) if isinstance(value, bytes) else
                 ctypes.c_void_p(None) if value is None else ctypes.c_long(int(str(value))) for value in arguments]
    result = int(_libc().syscall(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
