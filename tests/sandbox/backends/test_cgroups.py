from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tandem.core.boxes import SandboxLimits
from tandem.sandbox.backends import cgroups
from tandem.sandbox.backends.cgroups import SPARE_BYTES, Cgroups, Group, memory_ceiling, sweep


def test_files_live_in_memory_and_never_starve_the_agent() -> None:
    assert memory_ceiling(SandboxLimits(memory_bytes=512, disk_bytes=10)) == 10 + SPARE_BYTES
    assert memory_ceiling(SandboxLimits(memory_bytes=2**30, disk_bytes=2**20)) == 2**30


def test_values_of_both_versions(tmp_path: Path) -> None:
    limits = SandboxLimits(memory_bytes=2**30, cpus=0.5, pids=20)
    names = ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes", "cpu.cfs_quota_us")
    for name in names:
        (tmp_path / name).touch()
    controllers = ("memory", "pids", "cpu")
    ((_, _, unified),) = Cgroups((Group(tmp_path, True, controllers),)).box_folders(1, limits)
    assert dict(unified) == {
        "memory.max": str(2**30), "memory.swap.max": "0", "pids.max": "36", "cpu.max": "50000 100000",
    }
    ((folder, _, legacy),) = Cgroups((Group(tmp_path, False, controllers),)).box_folders(7, limits)
    assert folder == str(tmp_path / "box-7")
    assert dict(legacy) == {
        "memory.limit_in_bytes": str(2**30), "memory.memsw.limit_in_bytes": str(2**30),
        "memory.kmem.tcp.limit_in_bytes": str(2**28), "pids.max": "36",
        "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000",
    }
    assert list(dict(legacy))[0] == "memory.limit_in_bytes"  # memsw may not be below it


def test_oom_kills_are_read_from_either_version(tmp_path: Path) -> None:
    (tmp_path / "box-1").mkdir()
    (tmp_path / "box-1" / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "box-1" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert Cgroups((Group(tmp_path, True, ("memory",)),)).oom_kills(1) == 3
    assert Cgroups((Group(tmp_path, False, ("memory",)),)).oom_kills(1) == 2
    assert Cgroups((Group(tmp_path, True, ()),)).oom_kills(1) == 0


def test_a_unified_group_is_made_where_controllers_can_be_handed_down(tmp_path: Path) -> None:
    """The nearest ancestor may hold processes (it hands nothing down); the next one up can."""
    own = tmp_path / "slice" / "scope"
    own.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "slice", own):
        (folder / "cgroup.procs").touch()

    def enable(parent: Path, folder: Path) -> tuple[str, ...]:
        return ("memory", "pids") if parent.name == "slice" else ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "_enable", enable)
        group = cgroups._open_unified(tmp_path, own, "tandem-x")
    assert group == Group(tmp_path / "slice" / "tandem-x", True, ("memory", "pids"))
    assert not (own / "tandem-x").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="making groups takes root or delegation")
def test_sweep_removes_what_the_dead_left_and_nothing_else() -> None:
    script = (
        "from tandem.core.boxes import SandboxLimits\n"
        "from tandem.sandbox.backends.cgroups import Cgroups\n"
        "import os\n"
        "groups = Cgroups.open()\n"
        "for folder, _, _ in groups.box_folders(1, SandboxLimits()): os.mkdir(folder)\n"
        "print(*(group.folder for group in groups.groups))\n"
    )
    import sys

    left = [Path(path) for path in subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()]
    if not left:
        pytest.skip("this machine lets us make no groups")
    ours = Cgroups.open()
    try:
        assert all(path.is_dir() for path in left)
        assert sweep() >= len(left)
        assert not any(path.exists() for path in left)
        assert all(group.folder.is_dir() for group in ours.groups)
    finally:
        ours.close()
    assert not any(group.folder.exists() for group in ours.groups)
