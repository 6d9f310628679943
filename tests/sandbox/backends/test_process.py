"""Long-lived commands of the namespace backend: streams, terminals, signals, deadlines, late listeners."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone
from tandem.sandbox.backend import Call, Outcome, Start, Terminal
from tandem.sandbox.backends.namespace import NamespaceBackend, NamespaceBox, may_map_ranges
from tandem.sandbox.backends.process import KEPT_BYTES, PIECE_BYTES, NamespaceProcess

SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=128 * 2**20, disk_bytes=16 * 2**20))


def in_a_box(work: Callable[[NamespaceBox], Awaitable[None]]) -> None:
    async def main() -> None:
        backend = NamespaceBackend()
        try:
            async with asyncio.timeout(30):
                await work(await backend.create(SPEC, timeout_s=20))
        finally:
            await backend.close()

    asyncio.run(main())


def shell(text: str, **more) -> Start:
    return Start(arguments=["/bin/sh", "-c", text], **more)


async def everything(process: NamespaceProcess, stream: str = "stdout") -> bytes:
    return b"".join([piece.data async for piece in process.output(from_start=True) if piece.stream == stream])


async def run(box: NamespaceBox, text: str) -> bytes:
    call = Call(arguments=["/bin/sh", "-c", text], timeout_s=30, stdout_cap_bytes=4096, stderr_cap_bytes=4096)
    return (await box.call(call)).stdout


def test_streams_stdin_and_the_exit_code() -> None:
    async def work(box: NamespaceBox) -> None:
        process = await box.start(shell("echo $$; echo complaint >&2; wc -c; exit 3", stdin=True))
        await process.send_stdin(b"x" * 700_000)  # more than the window
        await process.close_stdin()
        assert await everything(process) == f"{process.pid}\n700000\n".encode()
        assert await everything(process, "stderr") == b"complaint\n"
        assert (await process.wait()).code == 3
        with pytest.raises(SandboxError, match="ended"):
            await process.send_stdin(b"more")

    in_a_box(work)


def test_a_terminal_has_a_size_and_a_user() -> None:
    async def work(box: NamespaceBox) -> None:
        process = await box.start(Start(arguments=["/bin/sh"], terminal=Terminal(columns=101, rows=31)))
        await process.send_stdin(b"stty size; tty\n")
        seen = b""
        async for piece in process.output(from_start=True):
            assert piece.stream == "pty"
            seen += piece.data
            if b"/dev/pts/" in seen:
                break
        assert b"31 101" in seen
        await process.resize(Terminal(columns=55, rows=22))
        await process.send_stdin(b"stty size; exit 4\n")
        assert (await process.wait()).code == 4
        assert b"22 55" in await everything(process, "pty")

    in_a_box(work)


def test_a_command_that_is_not_there() -> None:
    async def work(box: NamespaceBox) -> None:
        with pytest.raises(FileNotFoundError, match="/nowhere"):
            await box.start(Start(arguments=["/nowhere"]))
        with pytest.raises(PermissionError):
            await box.start(Start(arguments=["/etc/passwd"]))

    in_a_box(work)


@pytest.mark.parametrize("leader_ends", [True, False])
def test_the_deadline_is_that_of_all_descendants(leader_ends: bool) -> None:
    async def work(box: NamespaceBox) -> None:
        text = "setsid sleep 9871 & (setsid sleep 9872 &); sleep 9873 & " + ("exit 0" if leader_ends else "wait")
        process = await box.start(shell(text, timeout_s=0.7))
        assert len((await run(box, "sleep 0.2; pgrep -x sleep")).split()) == 3
        outcome = await process.wait()
        assert (outcome.code, outcome.timed_out) == ((0, False) if leader_ends else (None, True))
        left = await run(box, "for i in 1 2 3 4 5 6; do pgrep -f 'sleep 987' >/dev/null || break; sleep 0.3; done; "
                              "pgrep -x sleep")
        assert left == b""

    in_a_box(work)


def test_signals_go_to_the_group_and_sigkill_to_all_below() -> None:
    async def work(box: NamespaceBox) -> None:
        process = await box.start(shell("sleep 9871 & exec sleep 9872"))
        await process.signal(signal.SIGTERM)
        assert (await process.wait()).code == 128 + signal.SIGTERM
        process = await box.start(shell("setsid sleep 9873 & exec sleep 9874"))
        await process.signal(signal.SIGKILL)
        assert (await process.wait()).code == 128 + signal.SIGKILL
        assert await run(box, "sleep 0.1; pgrep -x sleep") == b""

    in_a_box(work)


def test_nobody_listening_neither_blocks_nor_kills_and_late_listeners_get_the_kept_end() -> None:
    async def work(box: NamespaceBox) -> None:
        process = await box.start(shell("head -c 9000000 /dev/zero; echo end"))
        assert (await process.wait()).code == 0
        kept = await everything(process)
        assert len(kept) <= KEPT_BYTES and kept.endswith(b"end\n")
        lost = [piece.lost_bytes async for piece in process.output(from_start=True)]
        assert lost[0] == 9_000_004 - len(kept) and not any(lost[1:])
        process = await box.start(shell("while :; do echo more; sleep 0.01; done"))
        async for _ in process.output():
            break  # a listener that drops out
        assert not process.ended
        async for piece in process.output():
            assert b"more" in piece.data
            break

    in_a_box(work)


def test_byte_by_byte_output_costs_no_more_than_other() -> None:
    async def main() -> None:
        process = NamespaceProcess(1, Start(arguments=["x"]), lambda data: None, lambda: SandboxGone("gone"))
        for number in range(100_000):
            process.on_output("stdout", b"%d" % (number % 10))
            process.on_output("stdout", b"")
        process.on_end(Outcome(
            code=0, stdout=b"", stderr=b"", dropped_bytes=0, timed_out=False, started=True, oom_killed=False,
            duration_s=0.0,
        ))
        pieces = [piece async for piece in process.output(from_start=True)]
        assert len(pieces) <= KEPT_BYTES // PIECE_BYTES and pieces[-1].data == b"9"
        assert pieces[0].lost_bytes == 100_000 - len(pieces)

    asyncio.run(main())


def test_a_slow_listener_hears_how_much_it_missed() -> None:
    async def work(box: NamespaceBox) -> None:
        process = await box.start(shell("echo first; read go; head -c 9000000 /dev/zero; echo end", stdin=True))
        taken, lost = 0, 0
        async for piece in process.output(from_start=True):
            taken += len(piece.data)
            lost += piece.lost_bytes
            if taken == 6:
                await process.send_stdin(b"go\n")
                await process.wait()  # it takes nothing meanwhile
        assert taken + lost == 9_000_010 and lost > 0 and taken <= KEPT_BYTES + 6

    in_a_box(work)


def test_the_output_of_a_killed_box_is_aborted() -> None:
    async def work(box: NamespaceBox) -> None:
        process = await box.start(shell("echo here; exec sleep 999"))
        listening = asyncio.create_task(everything(process))
        await asyncio.sleep(0.1)
        await box.kill()
        with pytest.raises(SandboxGone):
            await listening
        with pytest.raises(SandboxGone):
            await process.wait()

    in_a_box(work)


def test_root_of_the_box_owns_its_files_and_nothing_of_the_host() -> None:
    if not may_map_ranges():
        pytest.skip("one user id only")

    async def work(box: NamespaceBox) -> None:
        text = ("id -u; cd /home/agent && touch /etc/mine a && chown 1000 a && stat -c %u a; "
                "touch /usr/mine 2>/dev/null; mount -t tmpfs x /mnt 2>/dev/null && echo mounted; kill -9 1; echo $?")
        assert await everything(await box.start(shell(text, user="root"))) == b"0\n1000\n0\n"
        seen = await run(box, "ls /etc/mine; touch /etc/theirs 2>/dev/null || grep Cap[PE] /proc/self/status")
        assert seen == b"/etc/mine\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n"
        assert not os.path.exists("/usr/mine") and not os.path.exists("/etc/mine")

    in_a_box(work)


def test_usage_counts_what_runs() -> None:
    async def work(box: NamespaceBox) -> None:
        before = await box.usage()
        if before.processes is None or before.memory_bytes is None:
            pytest.skip("no pids or memory controller for us")
        await box.start(shell("head -c 8000000 /dev/zero > /tmp/full; sleep 9871 & echo; wait", terminal=Terminal()))
        await asyncio.sleep(0.5)
        after = await box.usage()
        assert (after.processes or 0) >= before.processes + 3  # shim, shell, sleep
        assert (after.memory_bytes or 0) >= before.memory_bytes + 7_000_000

    in_a_box(work)
