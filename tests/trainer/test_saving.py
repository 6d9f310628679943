"""When a checkpoint is told of, and what a failed write does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future

import pytest

from tandem.core.errors import EngineError, RecordError
from tandem.core.events import AnyEvent, CheckpointBegun, CheckpointSaved, WarningRaised
from tandem.trainer.saving import Saver
from tests.trainer.pieces import MemorySink, MemoryStore


class SlowStore(MemoryStore):
    """Each write is on the disk when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Future[str]] = []

    def begin(self, step: int, extra: Mapping[str, object]) -> Future[str]:
        self.begun.append(step)
        self.open.append(Future())
        return self.open[-1]


def kinds(events: list[AnyEvent]) -> list[str]:
    told = [each for each in events if isinstance(each, CheckpointBegun | CheckpointSaved)]
    return [f"{type(each).__name__} {each.step}" for each in told]


def test_a_save_waits_for_the_last_one_and_is_told_of_when_it_is_there() -> None:
    store, sink = SlowStore(), MemorySink()

    async def go() -> None:
        async with Saver(store, sink) as saver:
            await saver.begin(1, {})
            sink.emit(WarningRaised(where="training", message="goes on"))
            await saver.check()
            assert kinds(sink.events) == ["CheckpointBegun 1"]
            second = asyncio.ensure_future(saver.begin(2, {}))
            await asyncio.sleep(0.02)
            assert store.begun == [1]
            store.open[0].set_result("one")
            await second
            assert kinds(sink.events) == ["CheckpointBegun 1", "CheckpointSaved 1", "CheckpointBegun 2"]
            asyncio.get_running_loop().call_later(0.02, store.open[1].set_result, "two")
        assert kinds(sink.events)[-1] == "CheckpointSaved 2"  # leaving has waited

    asyncio.run(go())
    (first, _) = sink.of(CheckpointSaved)
    assert first.path == "one" and first.save_s >= first.held_s >= 0


@pytest.mark.parametrize("ends", ["check", "begin", "leave"])
def test_a_failed_write_is_raised_at_the_next_border(ends: str) -> None:
    store, sink = SlowStore(), MemorySink()

    async def go() -> None:
        async with Saver(store, sink) as saver:
            await saver.begin(1, {})
            store.open[0].set_exception(RecordError("no space left at disk"))
            if ends == "check":
                await asyncio.sleep(0.02)
                await saver.check()
            elif ends == "begin":
                await saver.begin(2, {})

    with pytest.raises(RecordError, match="no space left"):
        asyncio.run(go())
    assert store.begun == [1] and not sink.of(CheckpointSaved)


def test_what_went_wrong_first_is_told() -> None:
    store = SlowStore()

    async def go() -> None:
        async with Saver(store, MemorySink()) as saver:
            await saver.begin(1, {})
            store.open[0].set_exception(RecordError("no space left at disk"))
            raise EngineError("the gradient is not finite")

    with pytest.raises(EngineError, match="not finite"):
        asyncio.run(go())
