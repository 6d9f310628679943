"""Attempts are told, or counted."""

from __future__ import annotations

import asyncio

from tandem.sandbox.network.attempts import BURST, Attempt, Attempts, Bucket


def test_each_is_told_or_counted() -> None:
    async def main() -> None:
        told: list[Attempt] = []
        attempts = Attempts(told.append)
        for number in range(BURST + 500):
            attempts.note(f"a:{number}", allowed=False, why="no")
        attempts.flush()
        attempts.flush()
        lines = [each for each in told if each.target]
        assert lines[0] == Attempt(target="a:0", allowed=False, why="no")
        assert BURST <= len(lines) < BURST + 100
        assert len(lines) + sum(each.suppressed for each in told) == BURST + 500

    asyncio.run(main())


def test_a_long_target_is_cut() -> None:
    async def main() -> None:
        told: list[Attempt] = []
        Attempts(told.append).note("x" * 10_000, allowed=True, why="y" * 10_000)
        assert len(told[0].target) == 300 and len(told[0].why) == 300

    asyncio.run(main())


def test_a_bucket_says_how_long_to_wait() -> None:
    async def main() -> None:
        bucket = Bucket(2, 50.0)
        assert bucket.take() and bucket.take() and not bucket.take() and 0 < bucket.wait_s <= 0.02
        await asyncio.sleep(0.05)
        assert bucket.take()

    asyncio.run(main())
