"""Giving the memory of a box that stands still to swap, so that a cold pause costs the machine next to nothing.

Owns: what is asked of the kernel: first the processes' own memory by ``process_madvise(MADV_PAGEOUT)``, then what else
the box's control group is charged for (the files that it keeps in memory). Nothing needs to be undone: a page comes
back when it is touched. Refuses: to call memory given back that is still there (``Pager.push_out`` says how much went).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.sandbox.backends.cgroups import Group

MADV_PAGEOUT = 21
NR_PROCESS_MADVISE = 440
PIECE_BYTES = 16 * 2**20  # of one request; several go at once, as compressing takes most of the time
THREADS = 2
GIVEN_BACK = 0.75  # of the processes' own memory: with less there was no room in swap
SMALL_BYTES = 8 * 2**20  # of which nobody asks how much went
HINT = "add swap (zram will do: `tandem doctor` says how), or pause warm"


class Pager:
    """Of one box, by its control groups."""

    def __init__(self, folders: list[tuple[Group, Path]]) -> None:
        self._folders = [(group, folder) for group, folder in folders if "memory" in group.controllers]

    def push_out(self, pids: list[int]) -> int:
        """Push the memory of still processes out; bytes of their own memory that went. Blocks: 0.1 s for 180 MiB.

        Raises:
            SandboxUnavailable: there is no swap. SandboxError: swap has no room for it; a part may have gone.
        """
        if not has_swap():
            raise SandboxUnavailable("a cold pause needs swap, and this machine has none", hint=HINT)
        for group, folder in self._folders:
            if group.unified and (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("max")
        before = resident(pids)
        with ThreadPoolExecutor(THREADS, "page-out") as threads:
            for pid in pids:
                _page_out(pid, threads)
        for group, folder in self._folders:
            self._empty(group, folder)
        after = resident(pids)
        if before > SMALL_BYTES and before - after < GIVEN_BACK * before:
            raise SandboxError(
                f"only {(before - after) >> 20} of {before >> 20} MiB went to swap, which has "
                f"{swap_free() >> 20} MiB free",
                hint=HINT,
            )
        return before - after

    def _empty(self, group: Group, folder: Path) -> None:
        """What else it is charged for, best effort: the kernel says EAGAIN or EBUSY when some of it stays, and it
        leaves alone files that were read again and again while nothing else is left to choose from."""
        with contextlib.suppress(OSError):
            if group.unified:
                (folder / "memory.reclaim").write_text((folder / "memory.current").read_text())
            else:
                (folder / "memory.force_empty").write_text("0")


def has_swap() -> bool:
    return bool(_swaps())


def swap_free() -> int:
    """Bytes."""
    return sum((int(size) - int(used)) * 1024 for _, _, size, used, *_ in _swaps())


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory that are the processes' own and not files; those that ended have none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
    return total


def _swaps() -> list[list[str]]:
    try:
        return [line.split() for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    except OSError:
        return []


def _page_out(pid: int, threads: ThreadPoolExecutor) -> None:
    """What the kernel refuses (locked memory) stays where it is."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        pieces: list[tuple[int, int]] = []
        for line in lines:
            places, rights, _, _, node = line.split()[:5]
            if "w" in rights or node == "0":  # else it is a file's, and in no need of swap
                first, last = (int(place, 16) for place in places.split("-"))
                pieces += [(at, min(PIECE_BYTES, last - at)) for at in range(first, last, PIECE_BYTES)]
        for _ in threads.map(lambda piece: _advise(handle, *piece), pieces):
            pass
    finally:
        os.close(handle)


def _advise(handle: int, first: int, count: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    vector = (ctypes.c_uint64 * 2)(first, count)
    done = libc.syscall(NR_PROCESS_MADVISE, handle, vector, ctypes.c_size_t(1), MADV_PAGEOUT, 0)
    if done < 0 and ctypes.get_errno() == errno.ENOSYS:
        raise SandboxUnavailable("this kernel has no process_madvise", hint="Linux 5.10 or newer, or pause warm")
