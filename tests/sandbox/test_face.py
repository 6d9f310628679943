from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from folderbox import FolderBackend

import tandem
from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import NetworkPolicy, SandboxState
from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.face import Sandbox
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import PauseMode


def test_the_package_gives_it_and_nothing_else() -> None:
    assert tandem.Sandbox is Sandbox
    with pytest.raises(AttributeError, match="'Sandbocks'"):
        _ = tandem.Sandbocks


def test_a_box_of_its_own_lives_as_long_as_its_context() -> None:
    async def main() -> None:
        try:
            async with Sandbox.create(environment={"WHO": "me"}, lifetime_s=60) as box:
                result = await box.commands.run("echo $WHO", timeout_s=30)
                assert result.stdout == "me\n" and box.state is SandboxState.RUNNING
        except SandboxUnavailable as error:
            pytest.skip(f"no boxes here: {error.message}")
        assert box.state is SandboxState.DEAD and not await box.kill()
        with pytest.raises(SandboxError, match="needs someone to end it"):
            await Sandbox.create()

    asyncio.run(main())


def test_a_live_fork_gives_each_child_the_running_command() -> None:
    async def main() -> None:
        try:
            async with Sandbox.create(lifetime_s=60) as box:
                assert box.commands.carried is None
                process = await box.commands.start(["bash"])
                await process.send_stdin(b"x=41\n")
                children = await box.fork(2, live=True)
                for number, child in enumerate(children):
                    assert isinstance(child, Sandbox), child
                    carried = child.commands.carried
                    assert carried is not None
                    await carried.send_stdin(f"echo $((x + {number})); exit {number}\n".encode())
                    assert (await carried.wait()).code == number
                    assert b"".join([piece.data async for piece in carried.output(from_start=True)]) == (
                        f"{41 + number}\n".encode()
                    )
                    assert (await child.commands.run("echo more", timeout_s=30)).stdout == "more\n"
                await process.send_stdin(b"exit $x\n")
                assert (await process.wait()).code == 41
                with pytest.raises(SandboxUnavailable, match="no long-lived command") as refused:
                    await box.fork(live=True)
                assert refused.value.hint and (await box.commands.run("echo on", timeout_s=30)).stdout == "on\n"
        except SandboxUnavailable as error:
            pytest.skip(f"no live fork here: {error.message}")

    asyncio.run(main())


def test_a_live_child_has_the_network_of_its_policy() -> None:
    listening = "awk '$4 == \"0A\" { print $2 }' /proc/net/tcp | sort; env | grep -ci _proxy"

    async def main() -> None:
        try:
            async with Sandbox.create(lifetime_s=60, network=NetworkPolicy(allow=("example.com",))) as box:
                await box.commands.start(["bash"])
                (child,) = await box.fork(live=True)
                assert isinstance(child, Sandbox), child
                answers = [(await each.commands.run(listening, timeout_s=30)).stdout for each in (box, child)]
                assert answers[0] == answers[1] and ":" in answers[0]
                await box.kill()
                assert (await child.commands.run(listening, timeout_s=30)).stdout == answers[1]
        except SandboxUnavailable as error:
            pytest.skip(f"no live fork or no network here: {error.message}")

    asyncio.run(main())


def test_every_verb_of_a_box(tmp_path: Path) -> None:
    async def main() -> None:
        backend = FolderBackend(tmp_path / "backend")
        manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), backend=backend, state=tmp_path / "state")
        async with Sandbox.create(manager=manager, metadata={"a": "b"}) as box:
            await box.files.write("x", "1")
            assert await box.pause() and not await box.pause()
            assert await box.files.read("x") == b"1" and not await box.resume()
            assert await box.pause(mode=PauseMode.FILES) and await box.resume()
            snapshot = await box.snapshot("base")
            (child,) = await box.fork()
            assert isinstance(child, Sandbox) and await child.files.read("x") == b"1"
            assert (await box.usage()).processes == 1
            box.set_timeout(30)
            again = await Sandbox.create(manager=manager, snapshot=snapshot.id)
            assert await again.files.read("x") == b"1"
            backend.faults["child 0"] = SandboxError("no")
            assert [type(each) for each in await box.fork(2, live=True)] == [SandboxError, Sandbox]
        assert box.state is SandboxState.DEAD and again.state is SandboxState.RUNNING
        with pytest.raises(SandboxUnavailable, match="moon"):
            async with Sandbox.create("moon", manager=manager):
                pass
        await manager.close()
        assert not backend.boxes

    asyncio.run(main())
