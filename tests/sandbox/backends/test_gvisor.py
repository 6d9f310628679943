"""What the seam's suite does not ask of gVisor boxes: roots of images, files and processes that are kept together, and
that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from box_pieces import SPEC, said, shell
from image_pieces import Image, system_layer

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxError, SandboxUnavailable, SnapshotError, SnapshotMissing
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backend import Layer, Root, Start
from tandem.sandbox.backends.gvisor import GvisorBackend
from tandem.sandbox.backends.gvisor_box import GvisorBox
from tandem.sandbox.backends.runsc import Runsc
from tandem.sandbox.images.library import BuildRequest, ImageLibrary
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import PauseMode

HOLDER = "import os, sys; f = open('kept', 'w'); f.write('a'); f.flush(); {}; print('holds', flush=True); input()"


@pytest.fixture(autouse=True)
def runsc() -> None:
    try:
        Runsc.find()
    except SandboxUnavailable as error:
        pytest.skip(error.message)


@contextlib.asynccontextmanager
async def backend() -> AsyncIterator[GvisorBackend]:
    made = GvisorBackend()
    try:
        yield made
    finally:
        await made.close()


async def holding(box: object, what: str) -> None:
    """A program that has a file open, and has done ``what`` meanwhile."""
    assert isinstance(box, GvisorBox)
    process = await box.start(Start(arguments=["python3", "-c", HOLDER.format(what)], stdin=True))
    async for piece in process.output(from_start=True):
        assert piece.data == b"holds\n"
        break


def layer_folder(folder: Path) -> Layer:
    folder.chmod(0o755)
    (folder / "srv").mkdir()
    (folder / "srv/mark").write_text("layer\n")
    return Layer(path=folder)


def test_templates_are_built_and_boxes_start_from_them(tmp_path: Path) -> None:
    library = ImageLibrary(tmp_path / "images")
    layout = Image([system_layer("cat", "id", "rm", "mkdir", "ls")], config={}).write_layout(tmp_path / "layout")
    asyncio.run(library.load(layout, name="base"))

    async def main() -> None:
        async with backend() as made:
            run = "RUN id -u > /who && rm /etc/group && mkdir /made && echo $WORD > /made/it\n"
            await library.build(BuildRequest(names=["own"], file=f"FROM base\nENV WORD=said\n{run}", spec=SPEC), made)
            lease = library.lease("own")
            assert not lease.root.host_base and len(lease.root.layers) == 2
            box = await made.create(SPEC, root=lease.root, timeout_s=20)
            assert await said(box, "cat /who /made/it; ls /usr; echo $WORD") == "0\nsaid\nshare\nsaid"
            assert "passwd" in await said(box, "ls /etc") and "group" not in await said(box, "ls /etc")
            lease.release()

    asyncio.run(main())


def test_a_manager_keeps_files_and_processes(tmp_path: Path) -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=GvisorBackend(), state=tmp_path)
        await manager.open()
        box = await manager.create(SPEC)
        await box.commands.run("echo one > /tmp/file", timeout_s=20)
        await manager.pause(box.id, mode=PauseMode.FILES)
        await manager.resume(box.id)
        await box.commands.start(["/bin/sh", "-c", "echo live > live; sleep 3955"])
        snapshot = await manager.snapshot(box.id, live=True, durable=True)
        (made,) = await manager.fork(box.id, 1)
        assert (child := made.session) is not None, made.error
        await box.commands.run("rm live; echo two > /tmp/file", timeout_s=20)
        await manager.kill(box.id)
        again = await manager.create(SandboxSpec(), snapshot=snapshot.id)
        text = "cat /tmp/file live; grep -l 395[5] /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
        assert (await child.commands.run(text, timeout_s=20)).stdout == "one\nlive\n0\n"
        assert (await again.commands.run(text, timeout_s=20)).stdout == "one\nlive\n2\n"
        await manager.close()

    asyncio.run(main())


def test_processes_are_kept_with_the_files_of_their_layers(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    layer = layer_folder(tmp_path / "layer")

    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, root=Root(layers=(layer,)), timeout_s=20)
            await holding(box, "os.rename('kept', 'moved')")
            await box.pause()
            frozen = await box.snapshot(live=True)
            with pytest.raises(SnapshotError, match="no files apart"):
                assert frozen.root
            saved = tmp_path / "saved"
            saved.mkdir()
            root = await frozen.save(saved)
            assert root == Root()
            await frozen.release()
            await box.resume()
            await said(box, "echo later > moved")
            (tmp_path / "layer/srv/mark").unlink()
            again = await made.restore(saved, SPEC, timeout_s=20)
            assert await said(again, "cat moved /srv/mark; ls") == "alayer\nmoved"
            (saved / "layer-1/srv/mark").unlink()
            (saved / "layer-1/srv").rmdir()
            (saved / "layer-1").rmdir()
            with pytest.raises(SnapshotMissing, match="layer-1"):
                await made.restore(saved, SPEC, timeout_s=20)

    asyncio.run(main())


def test_a_deleted_file_that_a_process_holds_is_named() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            await holding(box, "os.unlink('kept')")
            for taking in (box.snapshot(live=True), box.fork([SPEC], timeout_s=20)):
                with pytest.raises(SnapshotError, match="/home/agent/kept, which was deleted"):
                    await taking
            frozen = await box.snapshot()  # of files, where it is not
            child = await made.create(SPEC, root=frozen.root, timeout_s=20)
            assert await said(child, "ls; echo well") == await said(box, "ls; echo well") == "well"

    asyncio.run(main())


def test_its_disk_is_bounded_and_told() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            outcome = await box.call(shell("head -c 3000000 /dev/zero > f; head -c 30000000 /dev/zero > g"))
            assert outcome.code != 0 and b"No space left" in outcome.stderr
            usage = await box.usage()
            assert usage.disk_bytes == usage.disk_total_bytes == SPEC.limits.disk_bytes
            await said(box, "rm g; echo > fits")
            usage = await box.usage()
            assert usage.disk_bytes is not None and 3_000_000 <= usage.disk_bytes < 3_200_000
            many = "i=0; while :; do echo > file$i || exit; i=$((i+1)); done"
            assert (await box.call(shell(many, timeout_s=30))).code != 0
            assert await said(box, "rm file*; echo well") == "well"

    asyncio.run(main())


def test_copies_go_with_their_last_user() -> None:
    async def main() -> None:
        async with backend() as made:
            box = await made.create(SPEC, timeout_s=20)
            await said(box, "echo mine > f")
            frozen = await box.snapshot()
            children = await asyncio.gather(*(made.create(SPEC, root=frozen.root, timeout_s=20) for _ in range(2)))
            await children[0].kill()
            later = await children[1].snapshot()
            await frozen.release()
            await children[1].kill()
            await box.kill()
            last = await made.create(SPEC, root=later.root, timeout_s=20)
            assert await said(last, "cat f") == "mine"
            await later.release()
            await last.kill()
            async with asyncio.timeout(30):  # gVisor's helpers go a moment later
                while sorted(each.name for each in made.folder.iterdir()) != ["agent", "hidden", "root"]:
                    await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_broken_layer_is_named_and_a_hostile_one_leads_nowhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with backend() as made:
            with pytest.raises(SandboxError, match="open layer /nowhere"):
                await made.create(SPEC, root=Root(layers=(Layer(path=Path("/nowhere")),)), timeout_s=20)
            hostile = tmp_path / "hostile"
            hostile.mkdir()
            layer_folder(hostile)
            (hostile / "tmp").symlink_to("/dev/shm")
            before = set(Path("/dev/shm").iterdir())
            box = await made.create(SPEC, root=Root(layers=(Layer(path=hostile),)), timeout_s=20)
            assert await said(box, "cat /srv/mark") == "layer"
            assert set(Path("/dev/shm").iterdir()) == before

    asyncio.run(main())
