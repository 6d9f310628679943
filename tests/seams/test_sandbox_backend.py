"""The SandboxBackend seam: one suite for every backend. What a backend declares works, what it does not declare is
refused by an error that names a backend that can."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import importlib.util
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from e2b_pieces import KEY, RunningServer
from ordinary_user import as_ordinary_user

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import Isolation, NetworkPolicy, SandboxLimits, SandboxSpec
from tandem.core.errors import PluginError, SandboxGone, SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.abilities import OFFERS, Ability, who_can
from tandem.sandbox.backend import HOME, Box, Call, CallKind, Layer, Outcome, Root, SandboxBackend, Start, Terminal
from tandem.sandbox.backends.build import program
from tandem.sandbox.backends.gvisor import MEMORY, PREFIX, GvisorBackend
from tandem.sandbox.backends.namespace import NamespaceBackend
from tandem.sandbox.backends.remote import RemoteBackend, Service
from tandem.sandbox.backends.runsc import Runsc
from tandem.sandbox.factory import backends, make_backend
from tandem.sandbox.manager import SandboxManager

MIB = 2**20
SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=192 * MIB, disk_bytes=32 * MIB, lifetime_s=300))
CREATE_S = 20.0
LIMIT_S = 240.0
Scenario = Callable[[SandboxBackend], Awaitable[None]]
Opening = AbstractAsyncContextManager[SandboxBackend]
SCENARIOS: dict[str, Scenario] = {}
ABLE: dict[Ability, Scenario] = {}
UNABLE: dict[Ability, Callable[[SandboxBackend, Box], Awaitable[object]]] = {}


# ---- the backends


@contextlib.asynccontextmanager
async def namespace(cache: Path, url: str) -> AsyncIterator[SandboxBackend]:
    backend = NamespaceBackend(cache=cache)
    try:
        yield backend
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def remote(cache: Path, url: str) -> AsyncIterator[SandboxBackend]:
    backend = RemoteBackend(Service(url=url, key=KEY))
    try:
        yield backend
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def gvisor(cache: Path, url: str) -> AsyncIterator[SandboxBackend]:
    try:
        Runsc.find()
    except SandboxUnavailable as error:
        pytest.skip(error.message)
    backend = GvisorBackend(cache=cache)
    try:
        yield backend
    finally:
        await backend.close()
    assert not list(MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))


MADE: dict[str, Callable[[Path, str], Opening]] = {
    "gvisor": gvisor, "namespace": namespace, "namespace as an ordinary user": namespace, "remote": remote
}  # fmt: skip
NAMES = [name for name in MADE if os.geteuid() == 0 or "ordinary" not in name]


@pytest.fixture(scope="session")
def cache() -> Iterator[Path]:
    """The compiled program, where an ordinary user can read it too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        program(folder)
        yield folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second server of ours: the fleet."""
    if importlib.util.find_spec("e2b") is None:
        pytest.skip("E2B's SDK is not installed")
    with RunningServer(tmp_path_factory.mktemp("fleet")) as running:
        yield running.url


def run(name: str, scenario: Scenario, cache: Path, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue("url") if name == "remote" else ""

    async def main() -> None:
        async with MADE[name](cache, place) as backend, asyncio.timeout(LIMIT_S):
            await scenario(backend)

    if "ordinary" in name:
        as_ordinary_user(lambda: asyncio.run(main()))
    else:
        asyncio.run(main())


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def able(ability: Ability) -> Callable[[Scenario], Scenario]:
    def keep(function: Scenario) -> Scenario:
        ABLE[ability] = function
        return function

    return keep


# ---- pieces


async def fresh(backend: SandboxBackend) -> Box:
    return await backend.create(SPEC, timeout_s=CREATE_S)


def shell(text: str, **more: object) -> Call:
    values = {"timeout_s": 20.0, "stdout_cap_bytes": 4096, "stderr_cap_bytes": 4096} | more
    return Call(arguments=["/bin/sh", "-c", text], **values)  # type: ignore[arg-type]


def files(kind: CallKind, *arguments: str, **more: object) -> Call:
    values = {"timeout_s": 20.0, "stdout_cap_bytes": 4096, "stderr_cap_bytes": 4096, "folder": "/"} | more
    return Call(kind=kind, arguments=arguments, **values)  # type: ignore[arg-type]


async def said(box: Box, text: str) -> str:
    outcome = await box.call(shell(text))
    assert outcome.code == 0, outcome
    return outcome.stdout.decode()


async def until(box: Box, text: str) -> str:
    """What the command says once it says something."""
    while not (found := await said(box, text)):
        await asyncio.sleep(0.02)
    return found


def unheard(*told: object) -> None:
    """Of what a box tried to reach."""


# ---- what every backend does


@scenario
async def commands_have_codes_streams_and_times(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    parts: list[bytes] = []
    outcome = await box.call(shell("echo out; echo err >&2; exit 3", on_stdout=parts.append))
    assert (outcome.code, outcome.stdout, outcome.stderr, b"".join(parts)) == (3, b"out\n", b"err\n", b"out\n")
    assert outcome.started and not outcome.timed_out and 0 < outcome.duration_s < 20
    assert (await box.call(shell("kill -9 $$"))).code == 137
    missing = Call(arguments=["no-such-program"], timeout_s=30, stdout_cap_bytes=99, stderr_cap_bytes=999)
    assert (await box.call(missing)).code == 127
    assert (await box.call(dataclasses.replace(missing, arguments=["/etc/passwd"]))).code == 126
    exact = dataclasses.replace(missing, arguments=["printf", "%s|", "a  b'\n$c", ""])
    assert (await box.call(exact)).stdout == b"a  b'\n$c||"


@scenario
async def commands_have_folder_environment_and_input(backend: SandboxBackend) -> None:
    box = await backend.create(dataclasses.replace(SPEC, environment={"A": "spec", "B": "spec"}), timeout_s=CREATE_S)
    call = shell("pwd; echo $A $B; cat", folder="/tmp", environment={"B": "call"}, stdin=b"given")
    assert (await box.call(call)).stdout == b"/tmp\nspec call\ngiven"
    assert await said(box, "pwd; cat") == f"{HOME}\n"
    await box.call(shell("true", stdin=b"x" * 300_000))  # nobody reads it
    assert (await box.call(shell("wc -c", stdin=b"x" * 300_000))).stdout.strip() == b"300000"
    assert b"no-such" in (await box.call(shell("true", folder="/no-such"))).stderr


@scenario
async def output_past_the_cap_is_counted_and_dropped(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    outcome = await box.call(shell("head -c 300000 /dev/zero | tr '\\0' x", stdout_cap_bytes=1000))
    assert (outcome.code, outcome.stdout, outcome.dropped_bytes) == (0, b"x" * 1000, 299_000)


@scenario
async def a_deadline_ends_all_of_a_command(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    outcome = await box.call(shell("echo before; setsid sleep 3966 & sleep 3966", timeout_s=0.5))
    assert outcome.timed_out and outcome.code is None and outcome.stdout == b"before\n"
    await asyncio.wait_for(until(box, "grep -l 396[6] /proc/[0-9]*/cmdline 2>/dev/null || echo none"), 30)
    assert await said(box, "echo well") == "well\n"


@scenario
async def a_call_that_is_cancelled_ends_its_command(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    task = asyncio.ensure_future(box.call(shell("touch began; sleep 3977")))
    await until(box, "ls began 2>/dev/null || true")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while "none" not in await said(box, "grep -l 397[7] /proc/[0-9]*/cmdline 2>/dev/null || echo none"):
        await asyncio.sleep(0.05)


@scenario
async def many_commands_run_at_once(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    told = await asyncio.gather(*(said(box, f"sleep 0.1; echo {number}") for number in range(8)))
    assert told == [f"{number}\n" for number in range(8)]


@scenario
async def files_are_exact(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    data = bytes(range(256)) * 1000
    path = f"{HOME}/deep/er/file"

    async def do(kind: CallKind, *arguments: str, **more: object) -> Outcome:
        return await box.call(files(kind, *arguments, **more))

    assert (await do(CallKind.WRITE, path, stdin=data)).code == 0
    assert (await do(CallKind.READ, path, stdout_cap_bytes=len(data))).stdout == data
    too_large = await do(CallKind.READ, path, stdout_cap_bytes=10)
    assert too_large.code == errno.EFBIG or too_large.dropped_bytes
    assert (await do(CallKind.READ, f"{HOME}/none")).code == errno.ENOENT
    assert (await do(CallKind.READ, f"{HOME}/deep")).code == errno.EISDIR
    assert (await do(CallKind.WRITE, f"{HOME}/empty")).code == 0
    await box.call(shell("ln -s /etc/passwd link; mkdir -p more/folder"))
    names = (await do(CallKind.LIST, HOME)).stdout.split(b"\0")
    assert sorted(name for name in names if name) == [b"deep", b"empty", b"link", b"more"]
    assert (await do(CallKind.LIST, f"{HOME}/none")).code == errno.ENOENT
    assert (await do(CallKind.LIST, f"{HOME}/empty")).code == errno.ENOTDIR
    numbers, name, target = (await do(CallKind.STAT, f"{HOME}/link")).stdout.decode().split("\0")[:3]
    assert stat.S_ISLNK(int(numbers.split(" ")[0], 8)) and (name, target) == (f"{HOME}/link", "/etc/passwd")
    assert (await do(CallKind.STAT, f"{HOME}/none")).code == errno.ENOENT
    fields = (await do(CallKind.ENTRIES, f"{HOME}/deep", "2")).stdout.decode().split("\0")[:-1]
    assert sorted(fields[1::3]) == [f"{HOME}/deep/er", path]
    sizes = {name: numbers.split(" ")[3] for numbers, name in zip(fields[::3], fields[1::3], strict=True)}
    assert sizes[path] == str(len(data)) and all(len(each.split(" ")) == 6 for each in fields[::3])
    assert (await do(CallKind.MAKE_FOLDER, f"{HOME}/a/b")).code == 0
    assert (await do(CallKind.MAKE_FOLDER, f"{HOME}/a/b")).code == errno.EEXIST
    assert (await do(CallKind.MOVE, path, f"{HOME}/new/place")).code == 0
    assert (await do(CallKind.MOVE, path, f"{HOME}/x")).code == errno.ENOENT
    assert (await do(CallKind.READ, f"{HOME}/new/place", stdout_cap_bytes=len(data))).stdout == data
    assert (await do(CallKind.REMOVE, f"{HOME}/new")).code == 0
    assert (await do(CallKind.REMOVE, f"{HOME}/new")).code == errno.ENOENT
    assert (await do(CallKind.WRITE, "/proc/x", stdin=b"1")).code not in (0, None)


@scenario
async def boxes_know_nothing_of_each_other(backend: SandboxBackend) -> None:
    one, other = await asyncio.gather(fresh(backend), fresh(backend))
    await said(one, "echo secret > mine; sleep 3988 >/dev/null 2>&1 &")
    assert await said(other, "ls; grep -l 398[8] /proc/[0-9]*/cmdline 2>/dev/null || echo none") == "none\n"


@scenario
async def a_kill_is_final_and_may_come_twice(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    running = asyncio.ensure_future(box.call(shell("touch began; sleep 100", timeout_s=200)))
    await until(box, "ls began 2>/dev/null || true")
    await asyncio.gather(box.kill(), box.kill())
    assert box.gone.done() and box.gone.result()
    with pytest.raises(SandboxGone):
        await running
    await box.kill()
    for late in (box.call(shell("true")), box.pause(), box.resume()):
        with pytest.raises(SandboxGone):
            await late


@scenario
async def close_ends_every_box(backend: SandboxBackend) -> None:
    boxes = await asyncio.gather(*(fresh(backend) for _ in range(3)))
    await backend.close()
    assert all(box.gone.done() for box in boxes)


@scenario
async def what_is_not_there_is_refused(backend: SandboxBackend) -> None:
    with pytest.raises(SandboxUnavailable):
        await backend.create(dataclasses.replace(SPEC, template="no-such-template"), timeout_s=CREATE_S)


@scenario
async def more_isolation_than_it_has_is_refused(backend: SandboxBackend) -> None:
    manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend)
    for wanted in Isolation:
        spec = dataclasses.replace(SPEC, isolation=wanted)
        if wanted <= backend.isolation:
            await manager.create(spec)
            continue
        with pytest.raises(SandboxUnavailable, match=wanted.name.lower().replace("_", " ")) as caught:
            await manager.create(spec)
        better = [name for name, offer in OFFERS.items() if offer.isolation is None or offer.isolation >= wanted]
        assert all(name in caught.value.hint for name in better if name != backend.name)
    await manager.close()


# ---- abilities: that it works, and the verb that is refused where it is not declared


@able(Ability.PAUSE)
async def it_pauses(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    running = asyncio.ensure_future(box.call(shell("touch began; sleep 0.5; echo done", timeout_s=2.0)))
    await until(box, "ls began 2>/dev/null || true")
    await box.pause()
    await box.pause()
    await asyncio.sleep(2.2)  # its deadline, if pauses counted
    assert not running.done()
    await box.resume()
    await box.resume()
    outcome = await running
    assert outcome.stdout == b"done\n" and not outcome.timed_out
    await box.pause()
    await box.kill()


@able(Ability.COLD_PAUSE)
async def it_pauses_cold(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    await box.pause(cold=True)
    await box.resume()
    assert await said(box, "echo well") == "well\n"


@able(Ability.SNAPSHOT)
async def its_files_are_kept(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    await said(box, "echo one > file; mkdir -p sub; echo two > sub/file")
    frozen = await box.snapshot()
    await said(box, "echo later > file; rm -r sub")
    child = await backend.create(SPEC, root=frozen.root, timeout_s=CREATE_S)
    assert await said(child, "cat file sub/file") == "one\ntwo\n"
    await said(child, "echo child > file")
    assert await said(box, "cat file; ls") == "later\nfile\n"
    with tempfile.TemporaryDirectory() as folder:
        saved = await frozen.save(Path(folder) / "saved")
        await frozen.release()
        await frozen.release()
        again = await backend.create(SPEC, root=saved, timeout_s=CREATE_S)
        assert await said(again, "cat file") == "one\n"
        await again.kill()


COUNTER = ["/bin/sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.02; done"]


@able(Ability.LIVE_SNAPSHOT)
async def its_processes_are_kept(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    await box.start(Start(arguments=COUNTER))
    while int(await until(box, "cat count 2>/dev/null || true")) < 5:
        await asyncio.sleep(0.02)
    frozen = await box.snapshot(live=True)
    assert frozen.live
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "saved"
        await frozen.save(place)
        await frozen.release()
        before = int(await until(box, "cat count"))
        child = await backend.restore(place, SPEC, timeout_s=CREATE_S)
        first = int(await until(child, "cat count"))
        assert first >= 5
        while int(await until(child, "cat count")) <= first:
            await asyncio.sleep(0.02)
        await box.kill()
        assert before >= 5 and await said(child, "echo well") == "well\n"


@able(Ability.LIVE_FORK)
async def it_has_siblings_with_its_processes(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    await said(box, "echo parent > file")
    await box.start(Start(arguments=["python3", "-i"], stdin=True))
    children = await box.fork([SPEC, SPEC], timeout_s=CREATE_S)
    assert len(children) == 2
    for number, child in enumerate(children):
        assert not isinstance(child, Exception), child
        assert "python3" in await said(child, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert await said(child, f"cat file; echo {number} > file") == "parent\n"
    assert await said(box, "cat file") == "parent\n"


@able(Ability.PROCESSES)
async def it_has_long_lived_commands(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    process = await box.start(Start(arguments=["cat"], stdin=True))
    assert process.pid > 0
    await process.send_stdin(b"hello ")
    await process.send_stdin(b"world")
    await process.close_stdin()
    assert b"".join([piece.data async for piece in process.output(from_start=True)]) == b"hello world"
    assert (await process.wait()).code == 0
    sleeper = await box.start(Start(arguments=["sleep", "3999"]))
    await sleeper.signal(15)
    assert (await sleeper.wait()).code in (143, None)
    limited = await box.start(Start(arguments=["/bin/sh", "-c", "sleep 3998"], timeout_s=0.3))
    assert (await limited.wait()).timed_out
    for name, kind in (("no-such-program", FileNotFoundError), ("/etc/passwd", PermissionError)):
        with pytest.raises(kind):
            await box.start(Start(arguments=[name]))
    last = await box.start(Start(arguments=["sleep", "3997"]))
    await box.kill()
    with pytest.raises(SandboxGone):
        await last.wait()


@able(Ability.TERMINAL)
async def it_has_terminals(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    start = Start(arguments=["/bin/sh", "-c", "tty && stty size"], terminal=Terminal(columns=77, rows=11))
    process = await box.start(start)
    told = b"".join([piece.data async for piece in process.output(from_start=True)])
    assert b"/dev/pts/" in told and b"11 77" in told


@able(Ability.NETWORK)
async def its_network_has_a_policy(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    await box.set_network(NetworkPolicy(allow=("192.0.2.1",)), unheard)
    await box.set_network(NetworkPolicy(), unheard)


@able(Ability.PORTS)
async def its_ports_are_reached(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    with pytest.raises(ConnectionRefusedError):
        await box.connect(8099)
    await box.start(Start(arguments=["python3", "-m", "http.server", "8099", "--bind", "127.0.0.1"]))
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            reader, writer = await box.connect(8099)
            break
        await asyncio.sleep(0.05)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    assert b"200 OK" in await reader.read(1000)
    writer.close()


@able(Ability.IMAGES)
async def its_root_may_be_layers(backend: SandboxBackend) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "srv").mkdir()
        (folder / "srv/mark").write_text("layer\n")
        box = await backend.create(SPEC, root=Root(layers=(Layer(path=folder),)), timeout_s=CREATE_S)
        assert await said(box, "cat /srv/mark") == "layer\n"
        await box.kill()


@able(Ability.USAGE)
async def it_tells_its_cost(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    usage = await box.usage()
    told = [value for value in dataclasses.astuple(usage) if value is not None]
    assert all(value >= 0 for value in told)


@able(Ability.FILE_STREAMS)
async def files_come_and_go_in_parts_and_folders_are_watched(backend: SandboxBackend) -> None:
    box = await fresh(backend)
    watch = await box.start(Start(kind=CallKind.WATCH, arguments=[HOME, "1"], stdin=True))
    told = watch.output(from_start=True)
    assert (await anext(told)).data == f"k{HOME}\0".encode()
    writing = await box.start(Start(kind=CallKind.WRITE, arguments=[f"{HOME}/deep/f"], stdin=True))
    await writing.send_stdin(b"part" * MIB)
    await writing.close_stdin()
    assert (await writing.wait()).code == 0
    heard = b""
    async for piece in told:
        heard += piece.data
        if f"c{HOME}/deep/f\0".encode() in heard:
            break
    reading = await box.start(Start(kind=CallKind.READ_PARTS, arguments=[f"{HOME}/deep/f"], stdin=True))
    await reading.send_stdin(b"+")
    read = bytearray()
    async for piece in reading.output(from_start=True):
        read += piece.data
        if len(read) % MIB == 0:  # it gave what it was asked for and waits, at the end of the file, too
            await reading.send_stdin(b"+")
    assert bytes(read) == b"part" * MIB and (await reading.wait()).code == 0
    none = await box.start(Start(kind=CallKind.READ_PARTS, arguments=[f"{HOME}/none"], stdin=True))
    assert (await none.wait()).code == errno.ENOENT
    await watch.close_stdin()
    assert (await watch.wait()).code == 0


UNABLE.update({
    Ability.PAUSE: lambda backend, box: box.pause(),
    Ability.COLD_PAUSE: lambda backend, box: box.pause(cold=True),
    Ability.SNAPSHOT: lambda backend, box: box.snapshot(),
    Ability.LIVE_SNAPSHOT: lambda backend, box: box.snapshot(live=True),
    Ability.LIVE_FORK: lambda backend, box: box.fork([SPEC], timeout_s=CREATE_S),
    Ability.PROCESSES: lambda backend, box: box.start(Start(arguments=["true"])),
    Ability.TERMINAL: lambda backend, box: box.start(Start(arguments=["true"], terminal=Terminal())),
    Ability.NETWORK: lambda backend, box: box.set_network(NetworkPolicy(internet=True), unheard),
    Ability.PORTS: lambda backend, box: box.connect(8099),
    Ability.IMAGES: lambda backend, box: backend.create(
        SPEC, root=Root(layers=(Layer(path=Path("/nowhere")),)), timeout_s=CREATE_S
    ),
    Ability.USAGE: lambda backend, box: box.usage(),
    Ability.FILE_STREAMS: lambda backend, box: box.start(Start(kind=CallKind.WATCH, arguments=[HOME, "0"])),
})  # fmt: skip


# ---- the tests


@pytest.mark.parametrize("what", sorted(SCENARIOS))
@pytest.mark.parametrize("name", NAMES)
def test_every_backend(name: str, what: str, cache: Path, request: pytest.FixtureRequest) -> None:
    run(name, SCENARIOS[what], cache, request)


@pytest.mark.parametrize("ability", list(Ability))
@pytest.mark.parametrize("name", NAMES)
def test_it_can_or_refuses(name: str, ability: Ability, cache: Path, request: pytest.FixtureRequest) -> None:
    async def either(backend: SandboxBackend) -> None:
        box = await backend.create(SPEC, timeout_s=CREATE_S)  # what it can is known once it has begun
        if ability in backend.abilities:
            assert backend.name not in OFFERS or ability in OFFERS[backend.name].abilities
            await ABLE[ability](backend)
            return
        with pytest.raises(SandboxUnavailable) as caught:
            await UNABLE[ability](backend, box)
        for other in who_can(ability, but=backend.name):
            assert other in caught.value.hint

    run(name, either, cache, request)


# ---- how a backend is found


def test_backends_are_data() -> None:
    assert set(ABLE) == set(UNABLE) == set(Ability)
    assert {"gvisor", "namespace", "remote"} <= set(backends().names())
    with pytest.raises(PluginError, match="no sandbox named"):
        make_backend(SandboxSection(backend="microvms"))


def test_a_plug_in_is_told_the_section_and_the_state_folder(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def make(section, state):\n    return (section.memory_mb, state)\n")
    assert make_backend(SandboxSection(backend=f"{code}:make", memory_mb=99), tmp_path) == (99, tmp_path)
