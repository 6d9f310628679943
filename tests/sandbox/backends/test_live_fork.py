"""A running interpreter or shell is copied with all that it knows; parent, copies and host stay apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from box_pieces import SPEC, backend, said, shell

from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable
from tandem.sandbox.backend import Ability, Box, Start, Terminal
from tandem.sandbox.backends.freezer import Freezer
from tandem.sandbox.backends.live_fork import obstacle, only_process
from tandem.sandbox.backends.namespace import NamespaceBackend, may_map_ranges
from tandem.sandbox.backends.namespace_box import NamespaceBox
from tandem.sandbox.backends.process import NamespaceProcess

pytestmark = pytest.mark.skipif(
    bool(obstacle()) or not may_map_ranges(),
    reason=f"no live fork on this machine: {obstacle() or 'it needs root and layers'}",
)
BASH = Start(arguments=["bash"], stdin=True)
PYTHON = Start(arguments=["python3", "-i", "-q"], stdin=True)
MAP = (
    "import ctypes, os; c = ctypes.CDLL(None); c.mmap.restype = ctypes.c_void_p;"
    " map = lambda f, rights: c.mmap(None, 9, rights, 1, f, 0)"
)
SPACES = 0x10000000 | 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS


MARKS = itertools.count(1)


class Talk:
    """Lines to an interpreter, and what it prints between two marks of ours."""

    def __init__(self, process: NamespaceProcess, echo: str = "echo {}") -> None:
        self.process, self._echo = process, echo

    async def ask(self, line: str) -> str:
        number = next(MARKS)
        begin, end = f"begin-{number}.", f"end-{number}."
        text = f"{self._echo.format(begin)}\n{line}\n{self._echo.format(end)}\n"
        await self.process.send_stdin(text.encode())
        heard = ""
        async with asyncio.timeout(30):
            async for piece in self.process.output(from_start=True):
                heard += piece.data.decode() if piece.stream == "stdout" else ""
                if end in heard:
                    break
        return heard.partition(begin)[2].partition(end)[0].strip()


def python(process: NamespaceProcess) -> Talk:
    return Talk(process, "print('{}')")


def copy_of(child: Box | Exception) -> NamespaceBox:
    if isinstance(child, Exception):
        raise child
    assert isinstance(child, NamespaceBox)
    return child


def carried(child: Box | Exception) -> NamespaceProcess:
    process = copy_of(child).carried
    assert process is not None
    return process


@contextlib.asynccontextmanager
async def running(
    start: Start = BASH, state: Path | None = None
) -> AsyncIterator[tuple[NamespaceBackend, NamespaceBox, NamespaceProcess]]:
    async with backend(state) as made:
        box = await made.create(SPEC, timeout_s=20)
        if Ability.LIVE_FORK not in made.abilities:
            pytest.skip("no control group counts processes here")
        assert isinstance(box, NamespaceBox)
        yield made, box, await box.start(start)


async def fork(box: NamespaceBox, num_children: int = 1) -> list[Box | Exception]:
    return await box.fork([SPEC] * num_children, timeout_s=20)


async def refusal(box: NamespaceBox) -> str:
    with pytest.raises(SandboxUnavailable) as refused:
        await fork(box)
    assert refused.value.hint and await said(box, "echo well") == "well"
    return str(refused.value.message)


def test_a_shell_goes_on_in_every_copy_with_what_it_knows() -> None:
    async def main() -> None:
        async with running() as (_, box, process):
            parent = Talk(process)
            number = await parent.ask("echo $$ $BASHPID")
            assert await parent.ask("x=41; words=(a 'b c'); f() { echo $((x + 1)) \"${words[1]}\"; }; cd /tmp") == ""
            await box.call(shell("echo before > /tmp/note"))
            one, two = await fork(box, 2)
            first, second = Talk(carried(one)), Talk(carried(two))
            assert await first.ask("f; pwd; cat note") == "42 b c\n/tmp\nbefore"
            assert await first.ask("echo $$ $BASHPID") == number  # its own, as its parent's was
            await first.ask("x=1; echo mine > note")
            await second.ask("x=2")
            await parent.ask("x=3")
            assert [await each.ask("f") for each in (first, second, parent)] == ["2 b c", "3 b c", "4 b c"]
            assert [await each.ask("cat note") for each in (first, second, parent)] == ["mine", "before", "before"]
            assert await said(box, "cat /tmp/note") == await said(copy_of(two), "cat /tmp/note") == "before"

    asyncio.run(main())


def test_an_interpreter_goes_on_and_a_copy_forks_again() -> None:
    async def main() -> None:
        async with running(PYTHON) as (_, box, process):
            assert await python(process).ask("import os, json; state = {'n': 1}") == ""
            (child,) = await fork(box)
            talk = python(carried(child))
            assert await talk.ask("state['n'] += 1; print(json.dumps(state), os.getppid())") == '{"n": 2} 1'
            (grandchild,) = await fork(copy_of(child))
            assert await python(carried(grandchild)).ask("state['n'] += 1; print(state)") == "{'n': 3}"
            assert await talk.ask("print(state)") == "{'n': 2}"
            await talk.process.send_stdin(b"raise SystemExit(7)\n")
            assert (await talk.process.wait()).code == 7
            assert await said(copy_of(child), "echo still a box") == "still a box"

    asyncio.run(main())


def test_copies_draw_random_numbers_of_their_own_where_a_library_knows_a_copy_by_its_number() -> None:
    async def main() -> None:
        async with running(PYTHON) as (_, box, process):
            if "Error" in await python(process).ask("import os, ssl, uuid; x = ssl.RAND_bytes(8)"):
                pytest.skip("the python of the box has no ssl")
            (one,) = children = await fork(box)
            children += await fork(copy_of(one)) + await fork(box)
            talks = [python(process), *(python(carried(child)) for child in children)]
            for draw in ("ssl.RAND_bytes(8).hex()", "os.urandom(8).hex()", "uuid.uuid4()"):
                assert len({await talk.ask(f"print({draw})") for talk in talks}) == 4, draw

    asyncio.run(main())


def test_a_copy_of_the_roots_shell_has_the_roots_powers_and_no_more() -> None:
    async def main() -> None:
        async with running(Start(arguments=["bash"], stdin=True, user="root")) as (_, box, process):
            (child,) = await fork(box)
            for talk in (Talk(process), Talk(carried(child))):
                answer = await talk.ask("id -u; echo > f; chown 5:6 f; stat -c %u:%g f; unshare -m true 2>&1")
                assert answer.startswith("0\n5:6\n") and "Operation not permitted" in answer
            caps = "grep -h ^Cap /proc/self/status | grep -v Bnd"
            assert await Talk(process).ask(caps) == await Talk(carried(child)).ask(caps)
            assert await said(copy_of(child), f"{caps} | grep -c 0000000000000000") == "4"  # its user still has none

    asyncio.run(main())


def test_twenty_copies_share_memory() -> None:
    async def main() -> None:
        async with running(PYTHON) as (made, box, process):
            await python(process).ask("blob = b'x' * (50 << 20)")
            children = [copy_of(child) for child in await fork(box, 20)]
            asked = (python(carried(child)).ask(f"number = {i}") for i, child in enumerate(children))
            await asyncio.gather(*asked)
            answers = [await python(carried(child)).ask("print(number, len(blob))") for child in children]
            assert answers == [f"{i} {50 << 20}" for i in range(20)]
            proportional = 0
            for child in children:
                agent = made.keeper.pids[child.number]
                (pid,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                (line,) = (line for line in lines if line.startswith("Pss:"))
                proportional += int(line.split()[1])
            assert proportional < 150 << 10  # KiB; 20 copies of their own would have 1,000 MiB

    asyncio.run(main())


def test_a_copy_has_no_powers_and_its_filter() -> None:
    try_it = (
        "python3 -c \"import ctypes; c = ctypes.CDLL(None, use_errno=True);"
        f" print(c.unshare({SPACES}), ctypes.get_errno(), c.mount(b'none', b'/tmp', b'tmpfs', 0, None),"
        " ctypes.get_errno(), c.ptrace(16, 1, 0, 0), ctypes.get_errno())\""
    )
    asked = (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
        f"print(c.unshare({SPACES}), ctypes.get_errno(), c.syscall(56, {SPACES} | 17, 0, 0, 0, 0, 0), "
        "ctypes.get_errno(), "
        "c.mount(b'none', b'/tmp', b'tmpfs', 0, None), ctypes.get_errno())"
    )

    async def main() -> None:
        async with running(PYTHON) as (_, box, process):
            (child,) = await fork(box)
            for each in (python(process), python(carried(child))):  # the very processes that were held
                answer = await each.ask(asked)
                assert answer == "-1 1 -1 1 -1 1"
                status = await each.ask("print(open('/proc/self/status').read())")
                facts = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
                assert [int(facts[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")] == [0] * 4
                assert facts["Seccomp"] == "2" and facts["NoNewPrivs"] == "1"
                assert facts["Uid"].split() == ["1000"] * 4
                bounding = facts["CapBnd"]
                assert await each.ask("import os; print(os.nice(0))") == "0"
            for here in (box, copy_of(child)):
                assert await said(here, try_it) == "-1 1 -1 1 -1 1"
                assert await said(here, "sed -n 's/CapBnd:.//p' /proc/self/status") == bounding

    asyncio.run(main())


def test_a_copy_sees_its_own_box_only() -> None:
    async def main() -> None:
        async with running() as (made, box, _):
            one, two = (copy_of(child) for child in await fork(box, 2))
            for child in (one, two):
                names = (await said(child, "cat /proc/[0-9]*/comm")).split()
                assert set(names) <= {"bash", "box-agent", "box-shim", "sh", "cat"} and len(names) == 4
                assert await said(child, "ls /proc/1/cwd /proc/1/root 2>&1 | grep -c denied") == "2"
                assert "agent" not in await said(child, "ls /proc/ | grep -v '^[0-9]'")
                assert await said(child, "cat /proc/self/cgroup | grep -c '\\.\\.' || true") == "0"
            spaces = "readlink /proc/self/ns/{user,pid,mnt,net,ipc,uts} | sort"
            seen = [await said(each, f"bash -c '{spaces}'") for each in (box, one, two)]
            assert len({line for text in seen for line in text.splitlines()}) == 18
            looks = "cat ${f%comm}maps ${f%comm}mem ${f%comm}environ"
            seen = await said(box, f"for f in $(grep -l box- /proc/[0-9]*/comm); do echo agent; {looks}; done 2>&-; :")
            assert set(seen.split()) == {"agent"} and seen.count("agent") >= 4  # also for its parent
            groups = made.cgroups
            assert groups is not None
            for child in (one, two):
                usage = await child.usage()
                assert usage.processes == 2 and usage.memory_bytes

    asyncio.run(main())


def test_a_paused_parent_stays_paused_and_stands_alone() -> None:
    async def main() -> None:
        async with running() as (made, box, process):
            await Talk(process).ask("x=5")
            await box.pause()
            child = copy_of((await fork(box))[0])
            assert box.paused and await Talk(carried(child)).ask("echo $x") == "5"
            asked = asyncio.create_task(Talk(process).ask("echo $((x + 1))"))
            await asyncio.sleep(0.2)
            assert not asked.done()
            groups = made.cgroups
            assert groups is not None
            freezer = Freezer(groups.folders_of(box.number), made.keeper.pids[box.number])
            others = {made.keeper.pids[child.number]}
            assert len(freezer.processes()) == 3 and not others & set(freezer.processes())
            await box.resume()
            assert await asked == "6"

    asyncio.run(main())


def test_a_copy_is_a_whole_box() -> None:
    async def main() -> None:
        async with running() as (made, box, process):
            await Talk(process).ask("x=1")
            one, two = (copy_of(child) for child in await fork(box, 2))
            await one.pause()
            assert await Talk(carried(two)).ask("echo $x") == "1"
            await one.resume()
            assert await Talk(carried(one)).ask("echo $x") == "1"
            await one.call(shell("echo file > here"))
            frozen = await one.snapshot()
            again = await made.create(SPEC, root=frozen.root, timeout_s=20)
            assert await said(again, "cat here") == "file"
            await frozen.release()
            terminal = await one.start(Start(arguments=["cat"], terminal=Terminal()))
            await terminal.kill()
            root = await one.start(Start(arguments=["id", "-u"], user="root"))
            assert [piece.data async for piece in root.output(from_start=True)] == [b"0\n"]
            await carried(two).kill()
            assert (await carried(two).wait()).code == 137
            await one.kill()
            assert one.gone.done() and await said(two, "echo two") == "two" and await said(box, "echo box") == "box"

    asyncio.run(main())


def test_the_command_of_the_parent_ends_without_its_copies() -> None:
    async def main() -> None:
        async with running() as (_, box, process):
            (child,) = await fork(box)
            await process.kill()
            assert (await process.wait()).code == 137
            assert await Talk(carried(child)).ask("echo alive") == "alive"
            late = await box.call(shell("sleep 9 & setsid sleep 9 & sleep 9", timeout_s=0.2))
            assert late.timed_out
            assert await Talk(carried(child)).ask("echo alive") == "alive"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads"),
        ("held = open('/tmp/held', 'w')", "/tmp/held open"),
        ("import socket; s = socket.socket()", "socket:"),
        ("import mmap; m = mmap.mmap(-1, 4096)", "shares memory"),
        ("import mmap; m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)", "shares memory"),
        (f"{MAP}; f = os.memfd_create('x'); os.ftruncate(f, 9); m = map(f, 1); os.close(f)", "shares memory"),
        (f"{MAP}; f = os.open('/tmp/f', 66); os.ftruncate(f, 9); m = map(f, 3); os.close(f)", "shares memory"),
        (
            f"{MAP}; f = os.open('/tmp/f', 66); os.ftruncate(f, 9); m = map(f, 3); os.close(f);"
            " print(c.mprotect(ctypes.c_void_p(m), 9, 1))",
            "a file that a process writes",
        ),
        (
            f"{MAP}; c.shmat.restype = ctypes.c_void_p; m = c.shmat(c.shmget(0, 4096, 0o1600), None, 0o10000)",
            "shares memory",
        ),
        ("import subprocess; p = subprocess.Popen(['sleep', '60'])", "runs beside"),
        ("import signal; signal.signal(5, signal.SIG_IGN)", "SIGTRAP"),
        ("import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", "working folder"),
        ("import time; time.sleep(60)", "does not wait for input"),
    ],
)
def test_what_stands_in_the_way_is_named(line: str, why: str) -> None:
    async def main() -> None:
        async with running(PYTHON) as (_, box, process):
            if "sleep(60)" in line:
                await process.send_stdin(f"{line}\n".encode())
            else:
                await python(process).ask(line)
            assert why in await refusal(box)
            if "sleep(60)" not in line:
                assert await python(process).ask("print('well')") == "well"

    asyncio.run(main())


def test_a_shell_on_a_terminal_goes_on_on_one_of_its_own() -> None:
    async def main() -> None:
        start = Start(arguments=["bash", "--norc"], terminal=Terminal(columns=93, rows=27))
        async with running(start) as (_, box, process):
            await _typed(process, "x=41; stty -echo; PS1=; echo r'e'ady", "ready")
            one, two = await fork(box, 2)
            for child, number in ((one, 1), (two, 2)):
                copy = carried(child)
                heard = await _typed(copy, f"x=$((x + {number})); echo is $x on $(stty size); tty; echo don'e'", "done")
                assert f"is {41 + number} on 27 93" in heard and "/dev/pts/0" in heard
                await copy.resize(Terminal(columns=60, rows=20))
                assert "20 60" in await _typed(copy, "stty size; echo agai'n'", "again")
                await _typed(copy, "sleep 30 & jobs; kill %1; sleep 30; echo bac'k'", "back", interrupt=True)
            assert "is 41" in await _typed(process, "echo is $x; echo don'e'", "done")
            await copy_of(one).kill()
            await carried(two).send_stdin(b"exit 5\n")
            assert (await carried(two).wait()).code == 5

    asyncio.run(main())


async def _typed(process: NamespaceProcess, line: str, end: str, *, interrupt: bool = False) -> str:
    """What a terminal shows after a line, up to a word; ``interrupt``: control-C when it has shown a job."""
    heard = ""
    output = process.output()
    told = asyncio.ensure_future(anext(output))
    await asyncio.sleep(0)
    await process.send_stdin(f"{line}\n".encode())
    async with asyncio.timeout(30):
        while end not in heard:
            heard += (await told).data.decode()
            told = asyncio.ensure_future(anext(output))
            if interrupt and "Running" in heard:
                await asyncio.sleep(0.2)
                await process.send_stdin(b"\x03")
                interrupt = False
                line = f"echo {end}"
                await process.send_stdin(f"{line}\n".encode())
    told.cancel()
    return heard


def test_other_commands_are_refused() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            assert isinstance(box, NamespaceBox)
            assert "no long-lived command" in await refusal(box)
            one = await box.start(Start(arguments=["bash"], terminal=Terminal()))
            two = await box.start(BASH)
            assert "one command" in await refusal(box)
            await one.kill()
            await one.wait()
            assert only_process([two]) is two
            held = asyncio.create_task(box.call(shell("sleep 60", timeout_s=20)))
            async with asyncio.timeout(30):
                while "sleep" not in await said(box, "cat /proc/[0-9]*/comm"):
                    await asyncio.sleep(0.01)
            with pytest.raises(SandboxUnavailable, match="sleep"):
                await fork(box)
            held.cancel()

    asyncio.run(main())


def test_forks_without_a_change_of_files_make_no_deep_stack() -> None:
    async def main() -> None:
        async with running() as (_, box, process):
            talk = Talk(process)
            depths = []
            for line in ("x=1", "echo a > a", "x=2", "x=3", "rm a"):
                await talk.ask(line)
                (child,) = await fork(box)
                has = "a" if line.startswith(("echo", "x=2", "x=3")) else ""
                assert await Talk(carried(child)).ask("echo $(cat a 2>/dev/null)") == has
                assert await said(copy_of(child), "ls") == has
                depths.append(int(await said(box, "grep -o lowerdir /proc/self/mountinfo | wc -l")))
                await copy_of(child).kill()
            assert depths[0] <= depths[1] == depths[2] == depths[3] < depths[4]

    asyncio.run(main())


def test_input_that_was_sent_is_done_before_the_copy() -> None:
    async def main() -> None:
        async with running(PYTHON) as (_, box, process):
            for number in range(5):
                await process.send_stdin(f"import time; time.sleep(0.05); x = {number}\n".encode())
                (child,) = await fork(box)
                assert await python(carried(child)).ask("print(x)") == str(number)
                await copy_of(child).kill()

    asyncio.run(main())


def test_copies_outlive_their_parent() -> None:
    async def main() -> None:
        async with running() as (made, box, process):
            await Talk(process).ask("x=5")
            one, two = (copy_of(child) for child in await fork(box, 2))
            agent, groups = made.keeper.pids[box.number], made.cgroups
            assert groups is not None
            folders = [folder for _, folder in groups.folders_of(box.number)]
            await box.kill()
            with pytest.raises(SandboxGone):
                await box.call(shell("true"))
            assert await Talk(carried(one)).ask("echo $x") == "5"
            (again,) = await fork(one)
            await one.kill()
            assert await Talk(carried(again)).ask("echo $x") == "5"
            await two.kill()
            assert Path(f"/proc/{agent}").exists()  # in whose namespaces the last one lives
            await copy_of(again).kill()
            async with asyncio.timeout(30):
                while Path(f"/proc/{agent}").exists() or any(folder.exists() for folder in folders):
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_kill_in_the_middle_of_a_fork_leaves_nothing() -> None:
    async def main() -> None:
        async with backend() as made:
            for number in range(12):
                box = await made.create(SPEC, timeout_s=20)
                if Ability.LIVE_FORK not in made.abilities:
                    pytest.skip("no control group counts processes here")
                assert isinstance(box, NamespaceBox)
                await box.start(BASH)
                forking = asyncio.create_task(fork(box, 4))
                await asyncio.sleep(number * 0.002)
                await box.kill()
                try:
                    children = await forking
                except SandboxError:
                    continue
                for child in children:
                    if not isinstance(child, Exception):
                        assert await said(child, "echo whole") == "whole"
                        await child.kill()
            groups, keeper = made.cgroups, made.keeper.pid
            assert groups is not None
            async with asyncio.timeout(30):
                while Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split() or any(
                    each for group in groups.groups for each in group.folder.glob("*/")
                ):
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_every_end_leaves_the_keeper_as_it_was() -> None:
    async def family(made: NamespaceBackend, end: str) -> None:
        box = await made.create(SPEC, timeout_s=20)
        assert isinstance(box, NamespaceBox)
        await Talk(await box.start(BASH)).ask("echo a > f")
        children = [copy_of(child) for child in await fork(box, 2)]
        await Talk(carried(children[0])).ask("echo b > g")
        children += [copy_of(child) for child in await fork(children[0])]
        if end == "parent first":
            await box.kill()
        elif end == "paused":
            await children[2].pause()
        elif end.startswith("crash"):
            os.kill(made.keeper.pids[{"crash": box, "crash of a copy": children[0]}[end].number], signal.SIGKILL)
        for each in (*reversed(children), box):
            await each.kill()

    def held(made: NamespaceBackend) -> tuple[int, int, str]:
        place = Path(f"/proc/{made.keeper.pid}")
        mounts = len((place / "mountinfo").read_text().splitlines())
        children = (place / f"task/{made.keeper.pid}/children").read_text()
        return len(list((place / "fd").iterdir())), mounts, children

    async def main() -> None:
        async with running() as (made, first, _):
            await first.kill()
            await family(made, "")
            before = held(made)
            for end in ("parent first", "paused", "crash", "crash of a copy"):
                await family(made, end)
            async with asyncio.timeout(30):
                while held(made) != before:
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_copies_die_with_the_keeper_and_leave_nothing() -> None:
    async def main() -> None:
        async with running() as (made, box, _):
            children = [copy_of(child) for child in await fork(box, 3)]
            pids = [made.keeper.pids[each.number] for each in (box, *children)]
            os.kill(made.keeper.pid, signal.SIGKILL)
            for each in (box, *children):
                assert "keeper" in await asyncio.wait_for(asyncio.shield(each.gone), 30)
            async with asyncio.timeout(30):
                while any(_runs(pid) for pid in pids):
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_copies_are_adopted() -> None:
    async def main(state: Path) -> None:
        async with running(state=state) as (made, box, process):
            await Talk(process).ask("x=5")
            one, two = (copy_of(child) for child in await fork(box, 2))
            await box.kill()
            handles = {one.handle, two.handle}
            await made.leave()
            next_one = NamespaceBackend(state_folder=state)
            try:
                found = await next_one.adopt()
                assert set(found) == handles
                for each in found.values():
                    assert await said(each, "cat /proc/2/comm /proc/3/comm 2>/dev/null | head -1") == "bash"
                await found[one.handle].kill()
                assert await said(found[two.handle], "echo two") == "two"
            finally:
                await next_one.close()

    with tempfile.TemporaryDirectory() as folder:  # tmp_path is too long for a socket
        asyncio.run(main(Path(folder)))


def test_a_fork_bomb_in_a_copy_is_its_own() -> None:
    async def main() -> None:
        async with running() as (_, box, process):
            (child,) = await fork(box)
            bomb = asyncio.create_task(copy_of(child).call(shell("f() { f | f & }; f; sleep 5", timeout_s=1.0)))
            for _ in range(5):
                assert await said(box, "for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo well") == "well"
            assert await Talk(process).ask("(echo $(echo well))") == "well"
            await bomb

    asyncio.run(main())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

