"""The SandboxService seam: what a backend must do and its boxes withstand, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from ordinary_user import as_ordinary_user

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxLimits, SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, SandboxGone
from tandem.core.events import AnyEvent, SandboxCreated, SandboxFailed, SandboxKilled
from tandem.sandbox.backends.build import program
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.manager import SandboxManager

MIB = 2**20
SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=192 * MIB, disk_bytes=32 * MIB, pids=32))


# The folders that any Linux has; the host's others are nowhere in a box.
STANDARD = {"bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "media", "mnt", "opt", "proc",
            "root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"}  # fmt: skip


class MemorySink:
    """Keeps events in a list."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def put_blob(self, data: bytes) -> str:
        raise NotImplementedError("boxes store no blobs")


@dataclasses.dataclass
class Place:
    """A manager to test, and whether the machine gives it memory groups."""

    manager: SandboxManager
    sink: MemorySink
    backend: NamespaceBackend

    @property
    def counts_memory(self) -> bool:
        return self.backend.cgroups is not None and "memory" in self.backend.cgroups.controllers


@pytest.fixture(scope="session")
def cache() -> Iterator[Path]:
    """The compiled program, where an ordinary user can read it too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        program(folder)
        yield folder


SCENARIOS: dict[str, Callable[[Place], Awaitable[None]]] = {}


def scenario(function: Callable[[Place], Awaitable[None]]) -> Callable[[Place], Awaitable[None]]:
    SCENARIOS[function.__name__] = function
    return function


async def in_place(function: Callable[[Place], Awaitable[None]], cache: Path, warm: int = 0) -> None:
    sink, backend = MemorySink(), NamespaceBackend(cache=cache)
    manager = SandboxManager(SandboxSection(warm=warm), sink, backend=backend)
    try:
        await asyncio.wait_for(function(Place(manager, sink, backend)), 240)
    finally:
        await manager.close()
    assert not manager.live


MODES = ["root", "ordinary"] if os.geteuid() == 0 else ["ordinary"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("mode", MODES)
        metafunc.parametrize("name", sorted(SCENARIOS))


def test_scenario(name: str, mode: str, cache: Path) -> None:
    def run() -> None:
        asyncio.run(in_place(SCENARIOS[name], cache))

    if mode == "ordinary" and os.geteuid() == 0:
        as_ordinary_user(run)
    else:
        run()


# ---- the contract


@scenario
async def commands_return_code_output_and_time(place: Place) -> None:
    box = await place.manager.create(SPEC)
    assert box.state is SandboxState.RUNNING
    result = await box.commands.run("echo out; echo err >&2; exit 3", timeout_s=30)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not (result.timed_out or result.truncated or result.oom_killed)
    assert 0 < result.duration_s < 5
    assert (await box.commands.run("kill -9 $$", timeout_s=30)).exit_code == 137
    assert (await box.commands.run(["no-such-program"], timeout_s=30)).exit_code == 127
    assert (await box.commands.run(["/etc/passwd"], timeout_s=30)).exit_code == 126
    assert "no-such" in (await box.commands.run("true", cwd="/no-such", timeout_s=30)).stderr
    assert (await box.commands.run(["printf", "%s", "a  b'\n$c"], timeout_s=30)).stdout == "a  b'\n$c"


@scenario
async def commands_have_folder_environment_and_input(place: Place) -> None:
    box = await place.manager.create(dataclasses.replace(SPEC, environment={"FROM_SPEC": "1", "BOTH": "spec"}))
    result = await box.commands.run(
        "pwd; echo $FROM_SPEC $BOTH $HOME; id -un; cat", timeout_s=30, cwd="/tmp",
        environment={"BOTH": "call"}, stdin=b"given",
    )
    assert result.stdout == "/tmp\n1 call /home/agent\nagent\ngiven"
    large = b"0123456789abcdef" * 100_000
    result = await box.commands.run("wc -c; true", timeout_s=30, stdin=large)
    assert result.stdout.strip() == str(len(large))
    result = await box.commands.run("head -c 5", timeout_s=30, stdin=large)  # the reader leaves early
    assert (result.exit_code, result.stdout) == (0, "01234")
    result = await box.commands.run("python3 -c 'import json, ssl, ctypes; print(6 * 7)'", timeout_s=30)
    assert result.stdout == "42\n"


@scenario
async def output_streams_in_order(place: Place) -> None:
    box = await place.manager.create(SPEC)
    heard: list[tuple[float, bytes]] = []
    result = await box.commands.run(
        "echo one; sleep 0.3; echo two", timeout_s=30,
        on_stdout=lambda part: heard.append((time.monotonic(), part)),
    )
    assert b"".join(part for _, part in heard).decode() == result.stdout == "one\ntwo\n"
    assert heard[-1][0] - heard[0][0] > 0.2


@scenario
async def files_round_trip(place: Place) -> None:
    box = await place.manager.create(SPEC)
    data = bytes(range(256)) * 12_000
    await box.files.write("deep/er/data.bin", data)
    await box.files.write("/tmp/text.txt", "héllo")
    await box.files.write("empty", b"")
    assert await box.files.read("deep/er/data.bin") == data
    assert await box.files.read("empty") == b""
    assert (await box.commands.run("cat /tmp/text.txt; stat -c %s deep/er/data.bin", timeout_s=30)).stdout == (
        f"héllo{len(data)}\n"
    )
    assert await box.files.list(".") == ["deep", "empty"]
    await box.files.write("empty", b"no more")
    assert await box.files.read("empty") == b"no more"


@scenario
async def file_errors_are_python_errors(place: Place) -> None:
    box = await place.manager.create(SPEC)
    with pytest.raises(FileNotFoundError):
        await box.files.read("missing")
    with pytest.raises(FileNotFoundError):
        await box.files.list("missing")
    with pytest.raises(IsADirectoryError):
        await box.files.read("/tmp")
    with pytest.raises(OSError, match="Read-only|Permission"):
        await box.files.write("/usr/bin/evil", "x")
    with pytest.raises(OSError, match="Invalid argument"):
        await box.files.read("/dev/zero")
    await box.commands.run("mkfifo pipe", timeout_s=30)
    with pytest.raises(OSError, match="Invalid argument"):
        await box.files.read("pipe")
    with pytest.raises(OSError, match="No space left"):
        await box.files.write("flood", b"x" * (40 * MIB))
    await box.commands.run("rm flood", timeout_s=30)
    await box.files.write("large", b"x" * 1000)
    with pytest.raises(SandboxError, match="larger than 999"):
        await box.files.read("large", max_bytes=999)
    for mistake in (box.files.read("a\0"), box.commands.run("a\0", timeout_s=1), box.commands.run([], timeout_s=1)):
        with pytest.raises(ValueError, match="NUL|empty"):
            await mistake


@scenario
async def kill_is_final_and_idempotent(place: Place) -> None:
    box = await place.manager.create(SPEC)
    running = asyncio.create_task(box.commands.run("sleep 1000", timeout_s=100))
    await asyncio.sleep(0.1)
    await asyncio.gather(box.kill(), box.kill())
    with pytest.raises(SandboxGone, match=box.id):
        await running
    await box.kill()
    assert box.state is SandboxState.DEAD
    assert box.id not in place.manager.live
    with pytest.raises(SandboxGone):
        await box.commands.run("true", timeout_s=30)
    kinds = [type(event) for event in place.sink.events]
    assert kinds == [SandboxCreated, SandboxKilled]


@scenario
async def boxes_are_many_and_apart(place: Place) -> None:
    started = time.monotonic()
    boxes = await asyncio.gather(*(place.manager.create(SPEC) for _ in range(64)))
    assert time.monotonic() - started < 50
    await asyncio.gather(*(box.files.write("/tmp/me", box.id) for box in boxes))
    seen = await asyncio.gather(*(box.commands.run("cat /tmp/me; echo; ls /tmp | wc -l; ps ax | wc -l", timeout_s=30)
                                  for box in boxes))
    assert [result.stdout.split()[0] for result in seen] == [box.id for box in boxes]
    assert {result.stdout.split()[1] for result in seen} == {"1"}
    assert max(int(result.stdout.split()[2]) for result in seen) < 8


@scenario
async def commands_run_side_by_side(place: Place) -> None:
    box = await place.manager.create(SPEC)
    started = time.monotonic()
    results = await asyncio.gather(*(box.commands.run(f"sleep 2; echo {i}", timeout_s=30) for i in range(8)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(8)]
    assert time.monotonic() - started < 8 * 2 - 1


@scenario
async def a_lost_box_is_told_and_named(place: Place) -> None:
    box = await place.manager.create(dataclasses.replace(SPEC, limits=dataclasses.replace(SPEC.limits, lifetime_s=0.4)))
    with pytest.raises(SandboxGone, match=box.id):
        await asyncio.gather(*(box.commands.run("sleep 1000", timeout_s=100) for _ in range(2)))
    failures = [event for event in place.sink.events if isinstance(event, SandboxFailed)]
    assert [event.error for event in failures] == ["lifetime"]


@scenario
async def cancelled_commands_die(place: Place) -> None:
    box = await place.manager.create(SPEC)
    task = asyncio.create_task(box.commands.run("sleep 777 & sleep 778", timeout_s=100))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await survivors(box, "sleep 77") == 0


# ---- attacks


async def survivors(box, pattern: str) -> int:
    """Processes whose command line holds the pattern, after a moment to die."""
    count = -1
    for _ in range(20):
        listing = (await box.commands.run("ps ax -o stat,args", timeout_s=30)).stdout.splitlines()
        count = sum(pattern in line and not line.startswith("Z") for line in listing)
        if count == 0:
            break
        await asyncio.sleep(0.05)
    return count


@scenario
async def deadline_kills_the_whole_tree(place: Place) -> None:
    box = await place.manager.create(SPEC)
    await box.files.write("escape.py", (
        "import os, signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        "for depth in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.setpgid(0, 0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    ))
    result = await box.commands.run("setsid nohup sleep 1000 & python3 escape.py", timeout_s=2.5)
    assert result.timed_out and result.exit_code is None
    assert "ready" in result.stdout
    assert 2.4 < result.duration_s < 50
    assert await survivors(box, "1000") == 0 and await survivors(box, "escape.py") == 0
    assert (await box.commands.run("echo alive", timeout_s=30)).stdout == "alive\n"


@scenario
async def a_command_that_ends_keeps_its_background_work(place: Place) -> None:
    box = await place.manager.create(SPEC)
    result = await box.commands.run("(while true; do echo noise; sleep 0.01; done) & echo started", timeout_s=30)
    assert result.exit_code == 0 and not result.timed_out and "started" in result.stdout
    await asyncio.sleep(0.2)
    assert "noise" in (await box.commands.run("ps ax -o args | grep -v ps", timeout_s=30)).stdout
    result = await box.commands.run("yes & echo started >&2", timeout_s=30)  # even one that floods
    assert (result.exit_code, result.stderr, result.timed_out) == (0, "started\n", False)
    assert result.duration_s < 25
    result = await box.commands.run("head -c 60000 /dev/zero; echo end >&2", timeout_s=30)  # nothing is lost at the end
    assert (len(result.stdout), result.stderr) == (60000, "end\n")


@scenario
async def fork_bomb_ends_typed_and_hurts_nobody(place: Place) -> None:
    bombed, neighbour = await asyncio.gather(place.manager.create(SPEC), place.manager.create(SPEC))
    bomb = asyncio.create_task(bombed.commands.run("b() { b | b & b; }; b", timeout_s=2))
    await asyncio.sleep(0.5)
    assert (await neighbour.commands.run("echo fine", timeout_s=30)).stdout == "fine\n"
    result = await bomb
    assert result.timed_out or result.exit_code != 0
    again = await bombed.commands.run("echo alive; ps ax | wc -l", timeout_s=20)
    assert again.stdout.startswith("alive"), again
    left = await bombed.commands.run("for i in $(seq 99); do sleep 999 & done; echo full", timeout_s=30)
    assert left.exit_code != 0 or "full" in left.stdout  # whatever it left running makes room for what comes next
    assert (await bombed.commands.run("echo alive", timeout_s=30)).stdout == "alive\n"


@scenario
async def memory_hog_ends_typed(place: Place) -> None:
    box, neighbour = await asyncio.gather(place.manager.create(SPEC), place.manager.create(SPEC))
    hog = "python3 -c 'x = bytearray(2_000_000_000)'"
    result = await box.commands.run(hog, timeout_s=20)
    assert result.exit_code not in (0, None)
    assert result.oom_killed == place.counts_memory
    pack = "for i in 1 2 3; do python3 -c 'import time; x = b\"x\" * 120_000_000; time.sleep(2)' & done; wait"
    result = await box.commands.run(pack, timeout_s=20)
    assert result.oom_killed, result
    result = await box.commands.run("echo alive", timeout_s=30)
    assert result.stdout == "alive\n" and not result.oom_killed
    assert (await neighbour.commands.run("echo fine", timeout_s=30)).stdout == "fine\n"


@scenario
async def disk_flood_is_bounded(place: Place) -> None:
    box = await place.manager.create(SPEC)
    free = os.statvfs("/").f_bavail
    result = await box.commands.run("for d in /tmp /home/agent /dev/shm /var/tmp; do "
                                    "head -c 100000000 /dev/zero > $d/flood; done; du -sm --total /tmp /home/agent "
                                    "/dev/shm /var/tmp | tail -1", timeout_s=20)
    assert "No space left" in result.stderr
    assert int(result.stdout.split()[0]) <= 33
    assert free - os.statvfs("/").f_bavail < 1_000_000  # blocks; others write meanwhile
    many = "i=0; while : > /home/agent/n$i; do i=$((i+1)); done 2>/dev/null; echo end"
    assert not (await box.commands.run(many, timeout_s=30)).oom_killed
    result = await box.commands.run("rm -rf /home/agent/* /tmp/* /dev/shm/*; echo alive", timeout_s=20)
    assert result.stdout == "alive\n"


@scenario
async def a_gigabyte_of_output_is_dropped_and_counted(place: Place) -> None:
    box = await place.manager.create(SPEC)
    heard = 0

    def listen(part: bytes) -> None:
        nonlocal heard
        heard += len(part)

    result = await box.commands.run("head -c 1000000000 /dev/zero", timeout_s=60, on_stdout=listen)
    kept = SPEC.limits.output_bytes
    assert result.exit_code == 0 and result.truncated
    assert len(result.stdout) == heard == kept
    assert result.dropped_bytes == 1_000_000_000 - kept
    result = await box.commands.run("yes", timeout_s=0.5)
    assert result.timed_out and result.truncated and len(result.stdout) == kept


@scenario
async def paths_reach_nothing_of_the_host(place: Place) -> None:
    with tempfile.NamedTemporaryFile(mode="w", dir="/var/tmp") as secret:
        os.chmod(secret.name, 0o644)
        secret.write("host secret")
        secret.flush()
        box = await place.manager.create(SPEC)
        links = f"ln -s {secret.name} link; ln -s / root; ln -s /etc/passwd target; ln -s .. up"
        await box.commands.run(links, timeout_s=30)
        for path in ("link", f"root{secret.name}", f"../../../../..{secret.name}", f"/proc/1/root{secret.name}",
                     f"up/up/up/up{secret.name}", f"/proc/self/root{secret.name}"):
            with pytest.raises(OSError, match="No such file|Permission denied"):
                await box.files.read(path)
        assert b"agent" in await box.files.read("target")  # the box's own file, not the host's
        before = Path("/etc/passwd").read_bytes()
        try:
            await box.files.write("target", "owned")
        except OSError:
            assert place.counts_memory or os.geteuid() == 0
        assert Path("/etc/passwd").read_bytes() == before


@scenario
async def the_host_is_invisible(place: Place) -> None:
    box = await place.manager.create(SPEC)
    look = "ls -A / /root /home /sys /tmp 2>/dev/null; cat /proc/1/cmdline"
    listing = (await box.commands.run(look, timeout_s=30)).stdout
    assert str(os.getpid()) not in listing
    assert not (set(os.listdir("/")) - STANDARD) & set(listing.split())
    processes = (await box.commands.run("ls -d /proc/[0-9]*", timeout_s=30)).stdout.split()
    assert 2 <= len(processes) <= 5
    for attempt in ("cat /proc/1/environ", "ls /proc/1/fd", "ls -l /proc/1/exe", "cat /proc/1/maps",
                    "dd if=/proc/1/mem count=1", "cat /proc/kcore", "echo 1 > /proc/sys/kernel/sysrq",
                    "echo b > /proc/sysrq-trigger", "ls /dev/vda", "dmesg", "mount -t tmpfs none /mnt",
                    "mount --bind / /mnt", "umount /proc", "unshare -Ur true", "unshare -n true", "chroot /tmp true",
                    "hostname evil", "nsenter -t 1 -m true", "mknod /tmp/d b 254 0", "kill -9 1 && sleep 1",
                    "touch /usr/x", "date -s 2001-01-01", "cat /proc/kallsyms | grep -q ."):
        result = await box.commands.run(attempt, timeout_s=30)
        assert result.exit_code != 0 or attempt.startswith("kill"), (attempt, result)
    powers = "grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status"
    result = await box.commands.run(powers, timeout_s=30)
    permitted, effective, bounding, *rest = result.stdout.split()[1::2]
    assert [permitted, effective, *rest] == ["0000000000000000"] * 2 + ["1", "2"]
    # Out of reach without new privileges, and no more than what the box's root may do to the box's own files.
    assert int(bounding, 16) & ~0xFB == 0


@scenario
async def there_is_no_network(place: Place) -> None:
    box = await place.manager.create(SPEC)
    program_text = (
        "import socket\n"
        "for family, kind, protocol in ((socket.AF_VSOCK, 1, 0), (38, 5, 0), (socket.AF_PACKET, 3, 0), (16, 3, 15)):\n"
        "    try: socket.socket(family, kind, protocol)\n"
        "    except OSError as error: print('refused')\n"
        "for address in ('1.1.1.1', '169.254.169.254', '10.0.0.1'):\n"
        "    try: socket.create_connection((address, 80), 2)\n"
        "    except OSError as error: print('unreachable')\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname(), 2); print('loopback')\n"
        "print(len(socket.if_nameindex()))\n"
    )
    result = await box.commands.run(["python3", "-c", program_text], timeout_s=20)
    assert result.stdout.split() == ["refused"] * 4 + ["unreachable"] * 3 + ["loopback", "1"], result
    with tempfile.TemporaryDirectory() as folder:  # an abstract socket of the host is out of reach, too
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"\0tandem-test-{os.getpid()}{Path(folder).name}")
            server.listen()
            name = server.getsockname().decode()[1:]
            result = await box.commands.run(
                ["python3", "-c", f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"], timeout_s=10
            )
            assert "ConnectionRefused" in result.stderr


@scenario
async def a_command_may_attack_its_own_shim(place: Place) -> None:
    box = await place.manager.create(SPEC)
    result = await box.commands.run("setsid sleep 999 & sleep 0.1; kill -9 $PPID; kill -9 1; sleep 998", timeout_s=1.5)
    assert result.timed_out or result.exit_code == 137
    assert await survivors(box, "sleep 99") == 0
    assert (await box.commands.run("echo alive", timeout_s=30)).stdout == "alive\n"


def test_close_leaves_nothing_even_with_work_in_flight(cache: Path) -> None:
    async def main() -> None:
        sink = MemorySink()
        manager = SandboxManager(SandboxSection(warm=3), sink, backend=NamespaceBackend(cache=cache))
        boxes = await asyncio.gather(*(manager.create(SPEC) for _ in range(6)))
        tasks = [asyncio.create_task(box.commands.run("sleep 1000", timeout_s=500)) for box in boxes]
        await asyncio.sleep(0.1)
        await manager.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, SandboxGone) for error in ended)
        with pytest.raises(SandboxError, match="closed"):
            await manager.create(SPEC)
        assert sum(isinstance(event, SandboxKilled) for event in sink.events) == 6

    before, keepers = mounts_and_groups(), keepers_of_ours()
    asyncio.run(main())
    assert mounts_and_groups() == before
    assert keepers_of_ours() <= keepers  # those of other tests may end meanwhile


def keepers_of_ours() -> set[str]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "tandem-keeper"], capture_output=True, text=True)
    return set(found.stdout.split())


def mounts_and_groups() -> tuple[str, list[str]]:
    """Mounts, and this process's own groups. ``walk`` passes over groups of others that go meanwhile."""
    walked = os.walk("/sys/fs/cgroup")
    names = ((place, name) for place, names, _ in walked for name in names if name.startswith("tandem-"))
    groups = sorted(os.path.join(place, name) for place, name in names if f"-{os.getpid()}-" in name)
    return Path("/proc/self/mounts").read_text(), groups


if sys.platform != "linux":
    pytest.skip("boxes are Linux namespaces", allow_module_level=True)
