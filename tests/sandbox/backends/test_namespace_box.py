"""A box stands still, becomes layers while it goes on, and ends from every state."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from box_pieces import OLDER, SPEC, backend, said, shell
from image_pieces import system_layer

from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable, SnapshotError
from tandem.sandbox.abilities import Ability
from tandem.sandbox.backend import Call, Root, Start
from tandem.sandbox.backends.freezer import Freezer
from tandem.sandbox.backends.mounts import MountChoice, MountWay
from tandem.sandbox.backends.paging import has_swap
from tandem.sandbox.images.store import LayerStore

every_way = pytest.mark.parametrize("mounts", [
    pytest.param(None, id="best"),
    pytest.param(MountChoice(ways=OLDER), id="attached"),
    pytest.param(MountChoice(ways=(MountWay.STRING,)), id="string"),
    pytest.param(MountChoice(ways=(MountWay.STRING,), maps_ids=False), id="no-ids"),
])


def test_a_deadline_is_in_the_boxs_running_time() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            task = asyncio.create_task(box.call(shell("sleep 0.3; echo end", timeout_s=2.0)))
            await asyncio.sleep(0.1)
            await box.pause()
            await box.pause()
            await asyncio.sleep(2.2)
            assert not task.done()
            await box.resume()
            await box.resume()
            outcome = await task
            assert outcome.stdout == b"end\n" and not outcome.timed_out
            late = asyncio.create_task(box.call(shell("sleep 9", timeout_s=0.3)))
            await asyncio.sleep(0.1)
            await box.pause()
            await box.resume()
            assert (await late).timed_out

    asyncio.run(main())


def test_a_call_to_a_paused_box_waits_for_its_resume() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            await box.pause()
            task = asyncio.create_task(box.call(shell("echo hi", timeout_s=0.2)))
            await asyncio.sleep(0.6)
            assert not task.done()
            await box.resume()
            assert (await task).stdout == b"hi\n"

    asyncio.run(main())


def test_kill_ends_a_paused_box_and_its_calls() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            task = asyncio.create_task(box.call(shell("sleep 99", timeout_s=99)))
            await asyncio.sleep(0.05)
            await box.pause()
            await box.kill()
            with pytest.raises(SandboxGone):
                await task
            for verb in (box.pause, box.resume, box.snapshot):
                with pytest.raises(SandboxGone):
                    await verb()

    asyncio.run(main())


def test_a_cold_pause_says_when_there_is_no_swap() -> None:
    async def main() -> None:
        if has_swap():
            pytest.skip("this machine has swap")
        async with backend() as made:
            assert Ability.COLD_PAUSE not in made.abilities
            box = await made.create(SPEC, timeout_s=20)
            with pytest.raises(SandboxUnavailable, match="swap"):
                await box.pause(cold=True)
            await box.resume()
            assert await said(box, "echo on") == "on"

    asyncio.run(main())


@every_way
def test_children_start_from_a_snapshot_and_share_nothing_after(mounts: MountChoice | None) -> None:
    async def main() -> None:
        async with backend(mounts=mounts) as made:
            box = await made.create(SPEC, timeout_s=20)
            await said(box, "mkdir d; echo one > d/one; echo gone > gone; ln d/one hard; ln -s d/one soft")
            first = await box.snapshot()
            await said(box, "rm gone; rm -r d; mkdir d; echo two > d/two; echo more >> hard")
            second = await box.snapshot()
            await said(box, "echo later > later")
            await box.kill()
            old = await made.create(SPEC, root=first.root, timeout_s=20)
            new = await made.create(SPEC, root=second.root, timeout_s=20)
            twin = await made.create(SPEC, root=second.root, timeout_s=20)
            await first.release()
            await second.release()
            assert await said(old, "ls; cat d/one gone hard soft") == "d\ngone\nhard\nsoft\none\ngone\none\none"
            assert await said(new, "ls . d; cat hard") == ".:\nd\nhard\nsoft\n\nd:\ntwo\none\nmore"
            await said(new, "echo mine > d/two")
            assert await said(twin, "cat d/two; id -un; stat -c %U d/two") == "two\nagent\nagent"

    asyncio.run(main())


@every_way
def test_a_saved_snapshot_starts_boxes_of_another_backend(tmp_path: Path, mounts: MountChoice | None) -> None:
    async def main() -> None:
        async with backend(mounts=mounts) as made:
            box = await made.create(SPEC, timeout_s=20)
            await said(box, "mkdir d e; echo x > d/x; echo y > e/y; chmod 600 e/y; truncate -s 1M hole")
            await (await box.snapshot()).release()
            await said(box, "rm -r d; mkdir d; rm e/y; echo z > e/z")
            frozen = await box.snapshot()
            root = await frozen.save(tmp_path)
            await frozen.release()
            with pytest.raises(SnapshotError, match="released"):
                await frozen.save(tmp_path / "again")
        assert all(layer.path.is_relative_to(tmp_path) for layer in root.layers)
        async with backend(mounts=mounts) as later:
            child = await later.create(SPEC, root=root, timeout_s=20)
            assert await said(child, "ls -A d; ls e; stat -c %s hole; stat -c %U e/z") == "z\n1048576\nagent"

    asyncio.run(main())


@every_way
def test_files_in_use_are_copied_not_taken_away(mounts: MountChoice | None) -> None:
    async def main() -> None:
        async with backend(mounts=mounts) as made:
            box = await made.create(SPEC, timeout_s=20)
            text = "exec 3>>log; echo start >&3; while [ ! -e stop ]; do sleep 0.02; done; echo end >&3; cat log"
            task = asyncio.create_task(box.call(shell(text)))
            while await said(box, "cat log || true") != "start":
                await asyncio.sleep(0.01)
            frozen = await box.snapshot()
            await said(box, "touch stop")
            assert (await task).stdout == b"start\nend\n"
            child = await made.create(SPEC, root=frozen.root, timeout_s=20)
            assert await said(child, "ls; cat log") == "log\nstart"

    asyncio.run(main())


WAYS_BACK = {
    "descriptor": ("f = os.open('f', os.O_RDWR)", "f"),
    "mapping": ("o = open('f', 'r+b'); m = mmap.mmap(o.fileno(), 3); o.close()", "m[:] = b'BAD'"),
    "read-only mapping": (
        "o = open('f', 'r+b'); m = mmap.mmap(o.fileno(), 3); o.close();"
        " c = ctypes.CDLL(None); a = ctypes.addressof(ctypes.c_char.from_buffer(m)); p = ctypes.c_void_p(a & ~4095);"
        " c.mprotect(p, 4096, 1)",
        "c.mprotect(p, 4096, 3); ctypes.memmove(a, b'BAD', 3)",
    ),
    "sent": ("f = os.open('f', os.O_RDWR); socket.send_fds(one, [b'x'], [f]); os.close(f)", "received()"),
    "reopened": ("f = os.open('f', os.O_RDONLY)", "os.open(f'/proc/self/fd/{f}', os.O_RDWR)"),
    "path only": ("f = os.open('f', os.O_PATH)", "os.open(f'/proc/self/fd/{f}', os.O_RDWR)"),
    "sent folder": (
        "f = os.open('.', os.O_RDONLY); socket.send_fds(one, [b'x'], [f]); os.close(f)",
        "os.open('f', os.O_WRONLY, dir_fd=received())",
    ),
}
WRITER = """
import ctypes, mmap, os, socket, time
os.chdir("/tmp")
one, two = socket.socketpair()
received = lambda: socket.recv_fds(two, 1, 1)[1][0]
open("f", "w").write("old")
{prepare}
os.chdir("/")
open("/tmp/ready", "w").close()
while not os.path.exists("/tmp/go"):
    time.sleep(0.01)
try:
    {later}
except OSError:
    print("refused")
"""


@pytest.mark.parametrize("child", [False, True], ids=["new", "of a snapshot"])
@pytest.mark.parametrize("way", WAYS_BACK)
def test_nobody_writes_to_a_snapshot_that_is_taken(way: str, child: bool) -> None:
    prepare, later = WAYS_BACK[way]
    if "os.open" in later or later in ("f", "received()"):
        later = f"os.write({later}, b'BAD')"
    code = WRITER.format(prepare=prepare, later=later)

    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            if child:
                await said(box, "echo > first")
                box = await made.create(SPEC, root=(await box.snapshot()).root, timeout_s=20)
            call = Call(arguments=["python3", "-c", code], timeout_s=20, stdout_cap_bytes=99, stderr_cap_bytes=999)
            task = asyncio.create_task(box.call(call))
            while await said(box, "ls /tmp/ready || true") == "" and not task.done():
                await asyncio.sleep(0.01)
            frozen = await box.snapshot()
            await said(box, "touch /tmp/go")
            outcome = await task
            assert outcome.code == 0, outcome
            after = await said(box, "cat /tmp/f")
            assert after == "old" if outcome.stdout == b"refused\n" else after == "BAD"
            again = await made.create(SPEC, root=frozen.root, timeout_s=20)
            assert await said(again, "cat /tmp/f") == "old"

    asyncio.run(main())


def test_no_room_for_a_copy_fails_and_leaves_the_box_as_it_was() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            task = asyncio.create_task(box.call(shell("head -c 12M /dev/zero > big; sleep 99", timeout_s=60)))
            while await said(box, "stat -c %s big || true") != str(12 * 2**20):
                await asyncio.sleep(0.01)
            with pytest.raises(SnapshotError, match="No space"):
                await box.snapshot()
            assert not task.done() and await said(box, "stat -c %s big") == str(12 * 2**20)
            task.cancel()

    asyncio.run(main())


@every_way
def test_many_snapshots_and_a_paused_one(mounts: MountChoice | None) -> None:
    async def main() -> None:
        async with backend(mounts=mounts) as made:
            box = await made.create(SPEC, timeout_s=20)
            for number in range(40):
                await said(box, f"echo {number} > n; echo > f{number}")
                frozen = await box.snapshot()
            await box.pause()
            still = await box.snapshot()
            assert box.paused
            await box.resume()
            child = await made.create(SPEC, root=frozen.root, timeout_s=20)
            other = await made.create(SPEC, root=still.root, timeout_s=20)
            for each in (box, child, other):
                assert await said(each, "cat n; ls | wc -l") == "39\n41"

    asyncio.run(main())


def test_what_it_cannot_is_refused_by_name() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            with pytest.raises(SandboxUnavailable, match="live snapshot"):
                await box.snapshot(live=True)
            with pytest.raises(SandboxError, match="live fork"):
                await box.fork([SPEC], timeout_s=30)

    asyncio.run(main())


@every_way
def test_an_image_that_brings_its_own_system(tmp_path: Path, mounts: MountChoice | None) -> None:
    data = system_layer("cat", "id", "ls")
    layer = LayerStore(tmp_path / "store").add(f"sha256:{hashlib.sha256(data).hexdigest()}", iter([data]))

    async def main() -> None:
        async with backend(mounts=mounts) as made:
            root = Root(layers=(layer,), host_base=False, environment={"FROM_IMAGE": "yes"})
            box = await made.create(SPEC, root=root, timeout_s=20)
            assert await said(box, "id -u; echo $FROM_IMAGE > a; cat a") == "1000\nyes"
            assert "python3" not in await said(box, "ls /bin; cat /etc/passwd; echo > /dev/null")
            child = await made.create(SPEC, root=(await box.snapshot()).root, timeout_s=20)
            assert await said(child, "cat a") == "yes"

    asyncio.run(main())


def test_a_box_tells_what_it_costs() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            before = await box.usage()
            await said(box, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; head -c 5242880 /dev/zero > f")
            after = await box.usage()
            assert before.cpu_s is not None and after.cpu_s is not None and after.cpu_s >= before.cpu_s + 0.02
            assert after.processes in (before.processes, (before.processes or 0) + 1)  # its spare shim may be there
            if before.disk_bytes is None:
                pytest.skip("as an ordinary user its root may not be looked at")
            assert after.disk_bytes is not None and 5242880 <= after.disk_bytes - before.disk_bytes < 6_000_000
            assert after.disk_total_bytes == SPEC.limits.disk_bytes

    asyncio.run(main())


def test_what_no_group_counts_the_processes_tell() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            text = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done; exec sleep 60"
            process = await box.start(Start(arguments=["/bin/sh", "-c", text]))
            async for _ in process.output(from_start=True):
                break
            freezer = Freezer([], made.keeper.pids[1])
            assert (freezer.cpu_s() or 0) >= 0.02 and len(freezer.processes()) >= 2

    asyncio.run(main())
