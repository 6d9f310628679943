"""Every kernel makes roots somehow, and says how."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from box_pieces import OLDER, SPEC, backend, said

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backend import Start
from tandem.sandbox.backends.live_fork import obstacle
from tandem.sandbox.backends.mounts import DETAILS, MountChoice, Mounts, MountWay, read_found
from tandem.sandbox.backends.namespace import may_map_ranges
from tandem.sandbox.backends.namespace_box import NamespaceBox
from tandem.sandbox.backends.process import NamespaceProcess


@pytest.mark.parametrize("way", [MountWay.ATTACHED, MountWay.STRING])
@pytest.mark.parametrize("maps_ids", [True, False])
def test_what_was_asked_for_is_what_is_used(way: MountWay, maps_ids: bool) -> None:
    before = Path("/proc/self/mountinfo").read_text()

    async def main() -> None:
        async with backend(mounts=MountChoice(ways=(way,), maps_ids=maps_ids)) as made:
            assert made.mounts is None
            boxes = [await made.create(SPEC, timeout_s=20) for _ in range(3)]
            assert made.mounts is not None and made.mounts.way is way and (maps_ids or not made.mounts.maps_ids)
            for number, box in enumerate(boxes):
                line = f"echo {number} > own; cat own; id -un; stat -c %U own"
                assert (await said(box, line)).split() == [str(number), "agent", "agent"]
            listed = Path(f"/proc/{made.keeper.pid}/mountinfo").read_text().splitlines()
            for box in boxes:
                await box.kill()
            left = Path(f"/proc/{made.keeper.pid}/mountinfo").read_text().splitlines()
            assert len(listed) - len(left) == len(boxes)  # one for each box's own files; the overlays are theirs

    asyncio.run(main())
    assert Path("/proc/self/mountinfo").read_text() == before


@pytest.mark.skipif(not may_map_ranges(), reason="ids are root's to give")
def test_without_maps_a_boxs_root_has_no_power_over_the_machine() -> None:
    async def main() -> None:
        async with backend(mounts=MountChoice(maps_ids=False)) as made:
            box = await made.create(SPEC, timeout_s=20)
            assert (await said(box, "cat /proc/self/uid_map")).split() == ["0", "0", "65536"]
            line = "id -u; echo 1 > /proc/sys/kernel/panic || touch /usr/x || mount -t tmpfs none /mnt || echo no"
            process = await box.start(Start(arguments=["/bin/sh", "-c", line], user="root"))
            pieces = [piece.data async for piece in process.output(from_start=True) if piece.stream == "stdout"]
            assert b"".join(pieces) == b"0\nno\n"

    asyncio.run(main())


def test_words() -> None:
    assert read_found("di") == Mounts(MountWay.DETACHED, True)
    assert read_found("s-") == Mounts(MountWay.STRING, False)
    assert set(DETAILS) == set(MountWay)
    with pytest.raises(SandboxUnavailable, match="no overlay here"):
        read_found("n-no overlay here")


@pytest.mark.skipif(bool(obstacle()) or not may_map_ranges(), reason="no live fork on this machine")
@pytest.mark.parametrize("choice", [MountChoice(ways=OLDER), MountChoice(ways=(MountWay.STRING,), maps_ids=False)])
def test_a_live_fork_needs_no_new_kernel(choice: MountChoice) -> None:
    async def heard(process: NamespaceProcess, word: bytes) -> None:
        text = b""
        async with asyncio.timeout(30):
            async for piece in process.output(from_start=True):
                text += piece.data
                if word in text:
                    return

    async def main() -> None:
        async with backend(mounts=choice) as made:
            box = await made.create(SPEC, timeout_s=20)
            process = await box.start(Start(arguments=["sh"], stdin=True))
            assert isinstance(process, NamespaceProcess)
            await process.send_stdin(b"n=41; echo filed > kept; echo ready\n")
            await heard(process, b"ready\n")
            (child,) = await box.fork([SPEC], timeout_s=20)
            assert isinstance(child, NamespaceBox) and child.carried is not None
            await child.carried.send_stdin(b"echo $((n + 1)) $(cat kept)\n")
            await heard(child.carried, b"42 filed\n")

    asyncio.run(main())
