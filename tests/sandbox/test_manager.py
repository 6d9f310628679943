from __future__ import annotations

import asyncio

import pytest

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.core.errors import PluginError, SandboxUnavailable
from tandem.core.events import AnyEvent, SandboxCreated, SandboxFailed, SandboxKilled
from tandem.sandbox.manager import SandboxManager, spec_of


class ListSink:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def put_blob(self, data: bytes) -> str:
        raise NotImplementedError("boxes store no blobs")


def test_the_recipe_becomes_a_spec() -> None:
    section = SandboxSection(memory_mb=64, cpus=0.5, pids=9, disk_mb=3, output_kb=2, lifetime_s=7.0)
    limits = spec_of(section).limits
    assert (limits.memory_bytes, limits.cpus, limits.pids) == (64 * 2**20, 0.5, 9)
    assert (limits.disk_bytes, limits.output_bytes, limits.lifetime_s) == (3 * 2**20, 2048, 7.0)


def test_events_tell_each_life_and_failure() -> None:
    async def main() -> list[AnyEvent]:
        sink = ListSink()
        manager = SandboxManager(SandboxSection(), sink)
        await manager.check(SandboxSpec())
        assert not sink.events
        first, second = await manager.create(SandboxSpec()), await manager.create(SandboxSpec())
        assert list(manager.live) == [first.id, second.id] and first.id != second.id
        await first.kill()
        with pytest.raises(SandboxUnavailable):
            await manager.create(SandboxSpec(template="moon"))
        await manager.close()
        await manager.close()
        assert not manager.live
        return sink.events

    created, also, killed, failed, last = asyncio.run(main())
    assert isinstance(created, SandboxCreated) and isinstance(also, SandboxCreated)
    assert created.backend == "namespace" and 0 < created.create_s < 10
    assert isinstance(killed, SandboxKilled) and killed.sandbox_id == created.sandbox_id
    assert isinstance(failed, SandboxFailed) and failed.error == "SandboxUnavailable" and "moon" in failed.detail
    assert isinstance(last, SandboxKilled) and last.sandbox_id == also.sandbox_id


def test_warm_boxes_answer_leases_and_go_at_close() -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(warm=2), ListSink())
        boxes = [await manager.create(SandboxSpec()) for _ in range(5)]
        results = await asyncio.gather(*(box.commands.run("echo $$ > /tmp/me; ls /tmp | wc -l", timeout_s=10)
                                         for box in boxes))
        assert {result.stdout for result in results} == {"1\n"}
        await manager.close()

    asyncio.run(main())


def test_an_impossible_box_is_known_at_the_check() -> None:
    async def main() -> None:
        manager = SandboxManager(SandboxSection(), ListSink())
        with pytest.raises(SandboxUnavailable, match="set host name") as caught:
            await manager.check(SandboxSpec(hostname="x" * 99))
        assert "doctor" in caught.value.hint
        await manager.close()

    asyncio.run(main())


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="'namespaces'") as caught:
        SandboxManager(SandboxSection(backend="namespaces"), ListSink())
    assert "namespace" in caught.value.hint
