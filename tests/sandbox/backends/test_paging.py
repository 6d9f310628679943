"""A cold pause gives memory back and loses none of it, on swap that is on for one test only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from box_pieces import backend, said

from benchmarks.pieces.swap import NoSwap, swap_file, zram
from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Process, Start
from tandem.sandbox.backends.cgroups import Cgroups
from tandem.sandbox.backends.freezer import Freezer
from tandem.sandbox.backends.namespace_box import NamespaceBox
from tandem.sandbox.backends.paging import GIVEN_BACK, has_swap, resident

pytestmark = pytest.mark.alone
MIB = 2**20
HELD = 40 * MIB
SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=192 * MIB, disk_bytes=32 * MIB))
HOLDER = f"""
import hashlib, os, sys
held = bytearray(os.urandom({HELD}))
for line in sys.stdin:
    print(hashlib.blake2b(held).hexdigest(), flush=True)
"""


@pytest.fixture(params=[zram, swap_file], ids=["zram", "file"])
def swap(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """No other swap is there, so that it is clear where memory went."""
    if os.geteuid() != 0:
        pytest.skip("only root turns swap on")
    if has_swap():
        pytest.skip("this machine has swap of its own")
    kind: Callable[..., AbstractContextManager[Path]] = request.param
    try:
        with kind(128 * MIB) if kind is zram else kind(128 * MIB, tmp_path) as place:
            yield place
    except NoSwap as error:
        pytest.skip(str(error))
    assert not has_swap()


async def digest(process: Process) -> bytes:
    listening = process.output()
    asking = asyncio.ensure_future(anext(aiter(listening)))
    await asyncio.sleep(0)
    await process.send_stdin(b"\n")
    return (await asking).data


def charged(box: NamespaceBox, groups: Cgroups | None) -> int | None:
    return None if groups is None else groups.number(
        box.number, "memory", unified="memory.current", legacy="memory.usage_in_bytes"
    )


def test_memory_and_files_leave_and_come_back(swap: Path) -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            assert isinstance(box, NamespaceBox)
            written = await said(box, "head -c 16M /dev/urandom | tee f | md5sum")
            process = await box.start(Start(arguments=["python3", "-c", HOLDER], stdin=True))
            before = await digest(process)
            pids = Freezer([], made.keeper.pids[box.number]).processes()
            held, used = resident(pids), charged(box, made.cgroups)
            assert held > HELD
            await box.pause()
            assert resident(pids) == held
            await box.pause(cold=True)
            assert resident(pids) < (1 - GIVEN_BACK) * held
            if used is not None:
                now = charged(box, made.cgroups)
                assert now is not None and now < used - HELD - 12 * MIB  # the file's 16 MiB went, too
            await box.pause(cold=True)
            await box.resume()
            assert await digest(process) == before
            assert resident(pids) > HELD and await said(box, "md5sum < f") == written
            await box.pause(cold=True)
            await box.kill()

    asyncio.run(main())


def test_swap_without_room_is_told(swap: Path) -> None:
    async def main() -> None:
        async with backend() as made:
            boxes = [await made.create(SPEC, timeout_s=20) for _ in range(4)]
            processes = [await box.start(Start(arguments=["python3", "-c", HOLDER], stdin=True)) for box in boxes]
            digests = [await digest(process) for process in processes]
            for box in boxes[:2]:
                await box.pause(cold=True)
            with pytest.raises(SandboxError, match="MiB free"):
                for box in boxes[2:]:
                    await box.pause(cold=True)
            for box in boxes:
                await box.resume()
            assert [await digest(process) for process in processes] == digests

    asyncio.run(main())
