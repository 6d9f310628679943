"""Boxes die with their owner, however it goes, and leave nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable
from tandem.sandbox.backend import Call, Layer, Root
from tandem.sandbox.backends.namespace import NamespaceBackend

SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=128 * 2**20, disk_bytes=16 * 2**20))
SUPERVISOR = """
import asyncio, sys
from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backend import Call
from tandem.sandbox.backends.namespace import NamespaceBackend

async def main():
    backend = NamespaceBackend()
    boxes = await asyncio.gather(*(backend.create(SandboxSpec(), timeout_s=20) for _ in range(3)))
    text = "setsid sleep {0} & exec sleep {0}".format(sys.argv[1])
    call = Call(arguments=["/bin/sh", "-c", text], timeout_s=999, stdout_cap_bytes=9, stderr_cap_bytes=9)
    tasks = [asyncio.create_task(box.call(call)) for box in boxes]
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.sleep(999)

asyncio.run(main())
"""


def shell(text: str, timeout_s: float = 20.0) -> Call:
    return Call(arguments=["/bin/sh", "-c", text], timeout_s=timeout_s, stdout_cap_bytes=4096, stderr_cap_bytes=4096)


def processes(*patterns: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                name = (folder / "comm").read_text()
            except OSError:
                continue
            if any(pattern in line or pattern in name for pattern in patterns):
                found.append(line)
    return found


OTHERS: set[str] = set()  # control groups of before: of a server that left its boxes, of one with the same number


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(path for path, _, _ in os.walk("/sys/fs/cgroup") if "tandem-" in path)


def groups(pid: int) -> list[str]:
    found = (path for path, _, _ in os.walk("/sys/fs/cgroup") if f"-{pid}-" in path and "tandem-" in path)
    return [path for path in found if path not in OTHERS]


def eventually(condition, what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["supervisor", "keeper"])
def test_a_killed_owner_leaves_nothing(victim: str) -> None:
    mark = f"98{os.getpid()}{len(victim)}"
    mounts = Path("/proc/self/mountinfo").read_text()
    owner = subprocess.Popen([sys.executable, "-c", SUPERVISOR, mark], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        assert len(processes(f"sleep {mark}")) >= 6
        (keeper,) = (int(pid) for pid in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split())
        os.kill(owner.pid if victim == "supervisor" else keeper, signal.SIGKILL)
        eventually(lambda: not processes(f"sleep {mark}"), "processes of the boxes outlive their owner")
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    if victim == "supervisor":
        eventually(lambda: not Path(f"/proc/{keeper}").exists(), "the keeper outlives its supervisor")
        eventually(lambda: not groups(owner.pid), "cgroups are left")
    else:  # nobody is left to clean up: the next start does
        async def start_and_stop() -> None:
            backend = NamespaceBackend()
            await backend.create(SPEC, timeout_s=20)
            await backend.close()

        asyncio.run(start_and_stop())
        assert not groups(owner.pid)
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_dead_keeper_is_told_and_replaced() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        box = await backend.create(SPEC, timeout_s=20)
        running = asyncio.create_task(box.call(shell("sleep 999")))
        await asyncio.sleep(0.1)
        os.kill(backend.keeper.pid, signal.SIGKILL)
        with pytest.raises(SandboxGone, match="keeper"):
            await running
        await box.kill()
        again = await backend.create(SPEC, timeout_s=20)
        assert (await again.call(shell("echo back"))).stdout == b"back\n"
        await backend.close()

    asyncio.run(main())
    assert not groups(os.getpid())


def test_two_hundred_lives_leave_nothing() -> None:
    async def main() -> int:
        backend = NamespaceBackend()
        await (await backend.create(SPEC, timeout_s=20)).kill()
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            boxes = await asyncio.gather(*(backend.create(SPEC, timeout_s=20) for _ in range(10)))
            outcomes = await asyncio.gather(*(box.call(shell("echo $$")) for box in boxes))
            assert all(outcome.code == 0 for outcome in outcomes)
            await asyncio.gather(*(box.kill() for box in boxes))
        assert len(os.listdir("/proc/self/fd")) == files
        assert not [path for path in groups(os.getpid()) if "box-" in path]
        keeper = backend.keeper.pid
        await backend.close()
        return keeper

    mounts = Path("/proc/self/mountinfo").read_text()
    keeper = asyncio.run(main())
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not groups(os.getpid())
    assert not Path(f"/proc/{keeper}").exists()


def test_cpu_is_limited_where_there_are_groups() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        box = await backend.create(
            dataclasses.replace(SPEC, limits=dataclasses.replace(SPEC.limits, cpus=0.2)), timeout_s=20
        )
        assert backend.cgroups is not None
        if "cpu" not in backend.cgroups.controllers:
            await backend.close()
            pytest.skip("no cpu controller for us")
        burn = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass\nprint(time.process_time())"
        outcome = await box.call(Call(
            arguments=["python3", "-c", burn], timeout_s=20, stdout_cap_bytes=99, stderr_cap_bytes=99
        ))
        assert float(outcome.stdout) < 0.6
        await backend.close()

    asyncio.run(main())


def test_a_failing_step_is_named_and_leaves_nothing() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        with pytest.raises(SandboxUnavailable, match="no template 'moon'"):
            await backend.create(dataclasses.replace(SPEC, template="moon"), timeout_s=20)
        with pytest.raises(SandboxError, match="set host name"):
            await backend.create(dataclasses.replace(SPEC, hostname="x" * 99), timeout_s=20)
        with pytest.raises(SandboxError, match="open layer /nowhere: No such file"):
            await backend.create(SPEC, root=Root(layers=(Layer(path=Path("/nowhere")),)), timeout_s=20)
        assert not [path for path in groups(os.getpid()) if "box-" in path]
        await backend.close()

    asyncio.run(main())


def test_a_raising_listener_ends_its_call_not_the_box() -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        box = await backend.create(SPEC, timeout_s=20)

        def listener(part: bytes) -> None:
            raise KeyError("mine")

        with pytest.raises(SandboxError, match="KeyError"):
            await box.call(dataclasses.replace(shell("echo a; sleep 5"), on_stdout=listener))
        assert (await box.call(shell("echo alive"))).stdout == b"alive\n"
        await backend.close()

    asyncio.run(main())
