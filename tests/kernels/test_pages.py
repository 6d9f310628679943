"""Zeros that take memory where they are written."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from tandem.kernels import pages
from tandem.kernels.pages import memory_file, prefer_large_pages, zeros


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_comes_with_the_first_write_and_goes_with_the_tensor() -> None:
    before = resident()
    made = zeros((1 << 20, 64), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert made.shape == (1 << 20, 64) and resident() - before < 16 << 20
    made[: 1 << 19] = 1
    assert resident() - before > 60 << 20
    assert not made[1 << 19 :: 4096].any() and (made[: 1 << 19 : 4096] == 1).all()
    del made
    assert resident() - before < 40 << 20


def test_nothing_is_a_tensor_too() -> None:
    assert zeros((0, 4), dtype=torch.float32, device=torch.device("cpu")).shape == (0, 4)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create on this system")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_file_in_memory_is_shared_and_has_no_name(is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_allowed:
        monkeypatch.setattr(pages, "_large_pages", lambda name: None)
    mounts = Path("/proc/self/mountinfo").read_text()
    file = memory_file("seen-by-two", 3 << 20)
    try:
        one, other = mmap.mmap(file, 3 << 20), mmap.mmap(file, 3 << 20)
        prefer_large_pages(other)
        one[2 << 20] = 7
        assert other[2 << 20] == 7 and not any(other[: 2 << 20])
        assert os.fstat(file).st_nlink == 0 and Path("/proc/self/mountinfo").read_text() == mounts
    finally:
        os.close(file)
    with pytest.raises(OSError):
        memory_file("no-size", -1)
