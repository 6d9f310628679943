"""Places that tests of several packages share, and the turns of processes that share a machine.

``make test`` runs two processes side by side (pytest-xdist). What a test looks at is its own: its folder, its boxes,
its server's port. A test that changes what every process of the machine sees (mounts, swap), or that needs its
processors for itself, is marked ``alone``: while it runs, no other test of this user does, in whichever session.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TURN_S = 300.0  # the longest that a test may have to wait for others to end
RUNS = {f"tests/app/test_{name}.py" for name in ("evaluate", "run", "serve", "session", "supervise")}

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything imports torch: each process takes its share of the cores
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """A file's tests stay together, for what they share; so do those files that look at the same runs (app/conftest).
    In the order of collection, which begins with the longest."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/app" if file in RUNS else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Each test with all that is made for it, in its turn."""
    alone = item.get_closest_marker("alone") is not None or "small_disk" in getattr(item, "fixturenames", ())
    with turn(fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        return (yield)


@contextmanager
def turn(kind: int) -> Iterator[None]:
    """Among others, or alone. Who wants to be alone holds the door: no new one comes in meanwhile."""
    folder = Path(tempfile.gettempdir(), f"tandem-tests-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        _take(door.fileno(), kind)
        _take(room.fileno(), kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a fork that outlives the test holds the file, too


def _take(descriptor: int, kind: int) -> None:
    deadline = time.monotonic() + TURN_S
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no turn after {TURN_S:.0f} s: another test of this machine does not end") from None
            time.sleep(0.01)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte. Its tests run alone: others see its mount."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)
