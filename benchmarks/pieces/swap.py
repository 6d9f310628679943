"""Swap for the time of one measurement or test, on machines that have none: compressed memory, or a file.

What was turned on is off again when the block ends. A process that is killed inside leaves its swap on: it shows in
/proc/swaps, and ``swapoff`` takes it away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

ZRAM = Path("/sys/class/zram-control")
PAGE = 4096
READY_S = 5.0


class NoSwap(Exception):
    """Why there can be none."""


@contextlib.contextmanager
def own_swap(num_bytes: int, folder: Path) -> Iterator[Path]:
    """The device, or the file in ``folder``. Raises NoSwap."""
    with contextlib.ExitStack() as held:
        try:
            place = held.enter_context(zram(num_bytes))
        except NoSwap as first:
            try:
                place = held.enter_context(swap_file(num_bytes, folder))
            except NoSwap as second:
                raise NoSwap(f"{first}; {second}") from second
        yield place


@contextlib.contextmanager
def zram(num_bytes: int) -> Iterator[Path]:
    """A device of its own: nobody else's is touched."""
    try:
        number = int((ZRAM / "hot_add").read_text())
    except (OSError, ValueError) as error:
        raise NoSwap(f"no zram device: {error}") from error
    settings, device = Path(f"/sys/block/zram{number}"), Path(f"/dev/zram{number}")
    made = False
    try:
        try:
            (settings / "disksize").write_text(str(num_bytes))
            deadline = time.monotonic() + READY_S
            while not device.exists() and not made:
                if time.monotonic() > deadline:  # nobody fills /dev here
                    major, minor = (settings / "dev").read_text().split(":")
                    os.mknod(device, 0o60600, os.makedev(int(major), int(minor)))
                    made = True
                time.sleep(0.01)
            with device.open("r+b") as file:
                file.write(_header(num_bytes))
        except OSError as error:
            raise NoSwap(f"no zram device: {error}") from error
        with _on(device):
            yield device
    finally:
        (settings / "reset").write_text("1")
        (ZRAM / "hot_remove").write_text(str(number))
        if made:
            device.unlink(missing_ok=True)


@contextlib.contextmanager
def swap_file(num_bytes: int, folder: Path) -> Iterator[Path]:
    file = folder / f"swap-{os.getpid()}"
    try:
        try:
            with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(_header(num_bytes))
                os.posix_fallocate(out.fileno(), 0, num_bytes)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise NoSwap(f"no swap file: {error}") from error
        with _on(file):
            yield file
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _on(place: Path) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.swapon(os.fsencode(place), 0) != 0:
        raise NoSwap(f"no swap on {place}: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        if libc.swapoff(os.fsencode(place)) != 0:
            raise OSError(ctypes.get_errno(), f"{place} is still swap: swapoff {place}")


def _header(num_bytes: int) -> bytes:
    """As mkswap writes it (linux/swap.h): version, last page, no bad pages, and the mark at the page's end."""
    page = bytearray(PAGE)
    struct.pack_into("<III", page, 1024, 1, num_bytes // PAGE - 1, 0)
    page[-10:] = b"SWAPSPACE2"
    return bytes(page)
