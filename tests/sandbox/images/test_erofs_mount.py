from __future__ import annotations

import os

import pytest

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.images.erofs_mount import can_mount_index, mount_erofs, require_index


def test_the_probe_leaves_nothing_and_agrees_with_the_refusal(tmp_path):
    problem = can_mount_index(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if problem:
        with pytest.raises(SandboxUnavailable):
            require_index(tmp_path)
    else:
        require_index(tmp_path)


def test_what_is_no_image_does_not_mount(tmp_path):
    (tmp_path / "x").write_bytes(bytes(8192))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        mount_erofs(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == descriptors
