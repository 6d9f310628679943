"""Work goes on when whoever asked for it is cancelled."""

import asyncio
import contextlib

import pytest

from tandem.sandbox.tasks import Tasks


def test_a_cancelled_caller_leaves_its_work_going() -> None:
    asyncio.run(cancelled_caller())


async def cancelled_caller() -> None:
    tasks, go, done = Tasks(), asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        done.append("work")
        tasks.own(after())

    async def after() -> None:
        await asyncio.sleep(0)
        done.append("after")

    caller = asyncio.create_task(tasks.finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    assert done == []
    go.set()
    await tasks.settled()
    assert done == ["work", "after"]


def test_an_error_is_the_callers_and_ends_nothing_else() -> None:
    asyncio.run(failing_work())


async def failing_work() -> None:
    tasks = Tasks()

    async def fails() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await tasks.finish(fails())
    tasks.own(fails())
    await tasks.settled()
