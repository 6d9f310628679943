"""Verbs on one box at the same moment: ``python benchmarks/sandbox_races.py [--rounds 200]``.

Each race is run with random delays, and afterwards looked at: no box came back from the dead, nothing hangs, no state
lies (a box that is said to run answers, one that is said to be gone is unknown), and at the end nothing is left.
Prints rounds, seconds and how the races went. A race that the backend has no verbs for is said to be skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec, SandboxState
from tandem.core.errors import SandboxError, SandboxGone
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.abilities import Ability
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import Life
from tandem.sandbox.session import Session

ROUND_TIMEOUT_S = 20.0
Race = Callable[[SandboxManager, random.Random], Awaitable[str]]


async def answers(session: Session) -> None:
    result = await session.commands.run(["echo", "here"], timeout_s=20)
    assert result.stdout == "here\n", f"{session.id} does not answer: {result}"


def assert_gone(manager: SandboxManager, session: Session) -> None:
    assert session.state is SandboxState.DEAD, f"{session.id} is {session.state}"
    assert session.id not in manager.live, f"{session.id} is known although it is dead"


async def together(draw: random.Random, *work: Coroutine[Any, Any, Any], spread_s: float = 0.003) -> list[Any]:
    """All at once, each after a random delay of up to ``spread_s``; results and errors of boxes in their order."""

    async def later(each: Coroutine[Any, Any, Any], delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        return await each

    delays = [draw.choice((0.0, 0.0, draw.random() * spread_s)) for _ in work]
    ends = await asyncio.gather(*map(later, work, delays), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, SandboxError):
            raise end
    return ends


async def resume_and_delete(manager: SandboxManager, draw: random.Random) -> str:
    session = await manager.create(SandboxSpec())
    await manager.pause(session.id)
    *resumed, first, second = await together(
        draw, *(manager.resume(session.id) for _ in range(3)), manager.kill(session.id), manager.kill(session.id)
    )
    assert first is True or second is True, "nobody killed it"
    assert sum(end is True for end in resumed) <= 1, "resumed twice"
    assert all(isinstance(end, bool | SandboxGone) for end in resumed), resumed
    assert_gone(manager, session)
    return "resumed first" if True in resumed else "deleted first"


async def pause_and_exec(manager: SandboxManager, draw: random.Random) -> str:
    session = await manager.create(SandboxSpec(), life=Life(auto_resume=draw.random() < 0.5))
    auto = manager.get(session.id).auto_resume
    # A call in flight when its box is paused waits with it: nobody waits for the calls before the last resume.
    calls = asyncio.ensure_future(together(draw, *(answers(session) for _ in range(3))))
    moves = await together(draw, manager.pause(session.id), manager.resume(session.id))
    assert session.state in (SandboxState.RUNNING, SandboxState.PAUSED), session.state
    assert manager.get(session.id).state is session.state, "the table lies"
    await manager.resume(session.id)
    ends = [*moves, *await calls]
    for end in ends:
        assert not isinstance(end, SandboxError) or (not auto and "not running" in end.message), end
    await answers(session)
    await manager.kill(session.id)
    assert_gone(manager, session)
    return "all answered" if all(end is None for end in ends[2:]) else "some refused"


async def fork_and_kill(manager: SandboxManager, draw: random.Random) -> str:
    session = await manager.create(SandboxSpec())
    forked, _ = await together(draw, manager.fork(session.id, 3), manager.kill(session.id), spread_s=0.03)
    assert_gone(manager, session)
    if isinstance(forked, SandboxError):
        assert isinstance(forked, SandboxGone), forked
        return "killed first"
    children = [child.session for child in forked if child.session is not None]
    for child in children:
        await answers(child)
        await manager.kill(child.id)
        assert_gone(manager, child)
    return "forked first"


async def interpreter(manager: SandboxManager) -> tuple[Session, Any]:
    """A box with an interpreter that knows something and waits for input."""
    session = await manager.create(SandboxSpec())
    process = await session.commands.start(["python3", "-i", "-q"])
    await process.send_stdin(b"state = 'kept'; print('ready')\n")
    await heard(process, "ready")
    return session, process


async def heard(process: Any, word: str) -> None:
    said = b""
    async for piece in process.output(from_start=True):
        said += piece.data if piece.stream == "stdout" else b""
        if word.encode() in said.splitlines():
            return
    raise AssertionError(f"the interpreter ended and had not said {word}: {said!r}")


async def goes_on(process: Any, draw: random.Random) -> None:
    word = f"{draw.getrandbits(40):x}"
    await process.send_stdin(f"print(state and {word!r})\n".encode())
    await heard(process, word)


async def whole_copies(manager: SandboxManager, forked: Any, draw: random.Random) -> int:
    """Each child answers, its copy goes on with what it knew, and it ends."""
    children = [child.session for child in forked if child.session is not None]
    for child in children:
        await answers(child)
        await goes_on(child.commands.carried, draw)
        await manager.kill(child.id)
        assert_gone(manager, child)
    return len(children)


async def live_fork_and_kill(manager: SandboxManager, draw: random.Random) -> str:
    session, _ = await interpreter(manager)
    forked, _ = await together(
        draw, manager.fork(session.id, 2, live=True), manager.kill(session.id), spread_s=0.05
    )
    assert_gone(manager, session)
    if isinstance(forked, SandboxError):
        assert isinstance(forked, SandboxGone), forked
        return "killed first"
    return f"{await whole_copies(manager, forked, draw)} copies"


async def live_fork_and_pause(manager: SandboxManager, draw: random.Random) -> str:
    session, process = await interpreter(manager)
    forked, paused, resumed = await together(
        draw, manager.fork(session.id, 2, live=True), manager.pause(session.id), manager.resume(session.id),
        spread_s=0.03,
    )
    assert not isinstance(paused, SandboxError) and not isinstance(resumed, SandboxError), (paused, resumed)
    assert not isinstance(forked, SandboxError), forked
    assert await whole_copies(manager, forked, draw) == 2
    rests = session.state
    assert rests in (SandboxState.RUNNING, SandboxState.PAUSED) and manager.get(session.id).state is rests
    await manager.resume(session.id)
    await goes_on(process, draw)
    await manager.kill(session.id)
    assert_gone(manager, session)
    return f"left {rests.value}"


async def live_fork_and_live_fork(manager: SandboxManager, draw: random.Random) -> str:
    """Two forks of one box at once, while input comes: it is in all copies that were made after it, or in none."""
    session, process = await interpreter(manager)
    first, second, _ = await together(
        draw, manager.fork(session.id, 2, live=True), manager.fork(session.id, 1, live=True), goes_on(process, draw)
    )
    assert not isinstance(first, SandboxError) and not isinstance(second, SandboxError), (first, second)
    assert await whole_copies(manager, first, draw) + await whole_copies(manager, second, draw) == 3
    await goes_on(process, draw)
    await manager.kill(session.id)
    assert_gone(manager, session)
    return "both"


async def snapshot_after_create(manager: SandboxManager, draw: random.Random) -> str:
    session = await manager.create(SandboxSpec())
    early = asyncio.ensure_future(together(draw, session.files.write("early", "1")))
    kills = draw.random() < 0.5
    taken, _ = await together(
        draw, manager.snapshot(session.id), manager.kill(session.id) if kills else manager.pause(session.id)
    )
    if not kills:  # the write may have been caught by the pause, and waits with the box
        await manager.resume(session.id)
    (written,) = await early
    how = "taken"
    if isinstance(taken, SandboxError):
        assert isinstance(taken, SandboxGone), taken
        how = "killed first"
    else:
        child = await manager.create(SandboxSpec(), snapshot=taken.id)
        await answers(child)
        await manager.kill(child.id)
        await manager.delete_snapshot(taken.id)
    assert written is None or isinstance(written, SandboxError)
    await manager.kill(session.id)
    assert_gone(manager, session)
    return how


RACES: dict[str, tuple[Race, frozenset[Ability]]] = {
    "resume and delete": (resume_and_delete, frozenset({Ability.PAUSE})),
    "pause and exec": (pause_and_exec, frozenset({Ability.PAUSE})),
    "fork and kill": (fork_and_kill, frozenset({Ability.SNAPSHOT})),
    "live fork and kill": (live_fork_and_kill, frozenset({Ability.LIVE_FORK, Ability.PROCESSES})),
    "live fork and pause": (live_fork_and_pause, frozenset({Ability.LIVE_FORK, Ability.PROCESSES, Ability.PAUSE})),
    "live fork twice": (live_fork_and_live_fork, frozenset({Ability.LIVE_FORK, Ability.PROCESSES})),
    "snapshot after create": (snapshot_after_create, frozenset({Ability.SNAPSHOT, Ability.PAUSE})),
}


async def rounds(manager: SandboxManager, name: str, count: int, *, seed: int = 0) -> Counter[str]:
    """How the rounds of a race went. Raises AssertionError, and TimeoutError for one that hangs."""
    race, _ = RACES[name]
    draw, ways = random.Random(seed), Counter[str]()
    for _ in range(count):
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            ways[await race(manager, draw)] += 1
    assert not manager.live, f"left: {list(manager.live)}"
    return ways


async def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        manager = SandboxManager(SandboxSection(warm=0), NowhereSink(), state=Path(folder) / "state")
        await manager.open()
        await (await manager.create(SandboxSpec())).kill()  # now the backend knows what it can
        for name, (_, needs) in RACES.items():
            missing = needs - manager.backend.abilities
            if missing:
                print(f"{name:<24} skipped: {manager.backend.name} cannot {', '.join(sorted(missing))} here")
                continue
            started = time.perf_counter()
            ways = await rounds(manager, name, count)
            said = ", ".join(f"{way} {number}" for way, number in ways.most_common())
            print(f"{name:<24} {count} rounds in {time.perf_counter() - started:.1f} s: {said}")
        await manager.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    asyncio.run(main(parser.parse_args().rounds))
