"""Boxes outlive a killed server that has a state folder, and are found by the next one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from box_pieces import SPEC, backend, said

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backend import Layer, LayerKind, Root, Start
from tandem.sandbox.backends.adoption import pack_root, unpack_root
from tandem.sandbox.backends.namespace import NamespaceBackend

SERVER = """
import asyncio, os, signal, sys
from pathlib import Path
from box_pieces import SPEC, said
from tandem.sandbox.backends.namespace import NamespaceBackend

async def main():
    backend = NamespaceBackend(state_folder=Path(sys.argv[1]), grace_s=int(sys.argv[2]))
    still, running = [await backend.create(SPEC, timeout_s=20) for _ in range(2)]
    await said(still, "echo kept > kept")
    await still.pause()
    print(still.handle, running.handle, backend.keeper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def killed_server(folder: Path, grace_s: int) -> tuple[str, str, int]:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(folder), str(grace_s)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent, timeout=300,
    )
    still, running, keeper = done.stdout.split()
    return still, running, int(keeper)


def test_the_next_server_finds_all_boxes_as_they_were(tmp_path: Path) -> None:
    still, running, keeper = killed_server(tmp_path, 30)

    async def main() -> None:
        async with backend(tmp_path) as made:
            found = await made.adopt()
            assert found.keys() == {still, running}
            assert found[still].paused and not found[running].paused
            assert await said(found[running], "echo on") == "on"
            await found[still].resume()
            assert await said(found[still], "cat kept") == "kept"
            fresh = await made.create(SPEC, timeout_s=20)
            assert fresh.handle not in found
            second = NamespaceBackend(state_folder=tmp_path)
            with pytest.raises(SandboxUnavailable, match="another process"):
                await second.adopt()
        assert not Path(f"/proc/{keeper}/ns").exists() or ended(keeper)

    asyncio.run(main())


def ended(pid: int) -> bool:
    for _ in range(500):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_nobody_comes_and_all_is_gone_after_the_grace(tmp_path: Path) -> None:
    _, _, keeper = killed_server(tmp_path, 0)
    assert ended(keeper)

    async def main() -> None:
        async with backend(tmp_path) as made:
            assert await made.adopt() == {}
            assert await said(await made.create(SPEC, timeout_s=20), "echo new") == "new"

    asyncio.run(main())


def test_leave_gives_the_boxes_away(tmp_path: Path) -> None:
    async def main() -> None:
        first = NamespaceBackend(state_folder=tmp_path)
        box = await first.create(SPEC, timeout_s=20)
        await said(box, "echo mine > mine")
        frozen = await box.snapshot()
        keeper = first.keeper.pid
        await first.leave()
        async with backend(tmp_path) as second:
            for _ in range(100):  # the keeper notices that its supervisor let go
                try:
                    found = await second.adopt()
                    break
                except SandboxUnavailable:
                    await asyncio.sleep(0.02)
            assert second.keeper.pid == keeper
            assert await said(found[box.handle], "cat mine") == "mine"
            child = await second.create(SPEC, root=frozen.root, timeout_s=20)
            assert await said(child, "cat mine") == "mine"

    asyncio.run(main())


def test_a_root_comes_back_as_it_was() -> None:
    layers = (Layer(path=Path("/a"), digest="d"), Layer(kind=LayerKind.EROFS_TAR, path=Path("/i"), device=Path("/t")))
    root = Root(layers=layers, host_base=False, environment={"A": "b"}, user="u", folder="/w")
    assert unpack_root(pack_root(root)) == root


def test_calls_of_an_earlier_process_are_not_taken_for_ours(tmp_path: Path) -> None:
    async def main() -> None:
        first = NamespaceBackend(state_folder=tmp_path)
        box = await first.create(SPEC, timeout_s=20)
        process = await box.start(Start(arguments=["/bin/sh", "-c", "while :; do echo old; sleep 0.01; done"]))
        async for _ in process.output():
            break
        await first.leave()
        async with backend(tmp_path) as second:
            for _ in range(100):
                try:
                    found = await second.adopt()
                    break
                except SandboxUnavailable:
                    await asyncio.sleep(0.02)
            assert await said(found[box.handle], "sleep 0.2; echo new") == "new"

    asyncio.run(main())
