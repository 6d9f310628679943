from __future__ import annotations

import asyncio

import pytest

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backend import Call, Outcome
from tandem.sandbox.pool import Pool


class CountedBox:
    """A box that only lives and dies."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def call(self, call: Call) -> Outcome:
        raise SandboxUnavailable("a counted box runs nothing")

    async def kill(self) -> None:
        if not self.gone.done():
            self.gone.set_result("killed")


class Maker:
    def __init__(self) -> None:
        self.made: list[CountedBox] = []
        self.broken = False

    async def __call__(self, spec: SandboxSpec) -> CountedBox:
        await asyncio.sleep(0.001)
        if self.broken:
            raise SandboxUnavailable("no more boxes")
        self.made.append(CountedBox(spec))
        return self.made[-1]


async def settle(pool: Pool, count: int) -> None:
    for _ in range(200):
        if pool.num_idle == count:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{pool.num_idle} idle boxes, not {count}")


def test_no_warm_boxes_means_on_demand() -> None:
    async def main() -> None:
        make = Maker()
        pool = Pool(make, size=0)
        box = await pool.lease(SandboxSpec())
        assert make.made == [box] and pool.num_idle == 0
        await pool.close()

    asyncio.run(main())


def test_leases_come_from_the_pool_once_and_the_gap_is_filled() -> None:
    async def main() -> None:
        make = Maker()
        pool = Pool(make, size=3)
        leased = [await pool.lease(SandboxSpec())]
        await settle(pool, 3)
        for _ in range(5):
            ready = pool.num_idle
            leased.append(await pool.lease(SandboxSpec()))
            assert ready == 3
            await settle(pool, 3)
        assert len(set(map(id, leased))) == 6
        await pool.close()
        idle = [box for box in make.made if box not in leased]
        assert all(box.gone.done() for box in idle) and not any(box.gone.done() for box in leased)

    asyncio.run(main())


def test_dead_boxes_are_not_leased() -> None:
    async def main() -> None:
        make = Maker()
        pool = Pool(make, size=2)
        await pool.lease(SandboxSpec())
        await settle(pool, 2)
        for box in make.made:
            await box.kill()
        assert not (await pool.lease(SandboxSpec())).gone.done()
        await pool.close()

    asyncio.run(main())


def test_another_spec_retires_what_is_idle() -> None:
    async def main() -> None:
        make = Maker()
        pool = Pool(make, size=2)
        first = await pool.lease(SandboxSpec(hostname="one"))
        await settle(pool, 2)
        box = await pool.lease(SandboxSpec(hostname="two"))
        assert isinstance(box, CountedBox) and box.spec.hostname == "two"
        await settle(pool, 2)
        await pool.close()
        alive = [made for made in make.made if not made.gone.done()]
        assert alive == [first, box]

    asyncio.run(main())


def test_boxes_of_the_last_few_specs_are_kept() -> None:
    async def main() -> None:
        make = Maker()
        pool = Pool(make, size=1, num_specs=2)
        specs = [SandboxSpec(hostname=name) for name in ("one", "two", "three")]
        for spec, idle in zip((specs[0], specs[1], specs[0], specs[2]), (1, 2, 2, 2), strict=True):
            await pool.lease(spec)
            await settle(pool, idle)
        made = len(make.made)
        box = await pool.lease(specs[0])  # "two" was not wanted for longest
        assert isinstance(box, CountedBox) and box in make.made[:made] and box.spec == specs[0]
        await settle(pool, 2)
        box = await pool.lease(specs[1])
        assert isinstance(box, CountedBox) and box not in make.made[:made + 1]
        await pool.close()

    asyncio.run(main())


def test_a_failing_refill_is_reported_by_the_next_lease_only() -> None:
    async def main() -> None:
        make = Maker()
        pool = Pool(make, size=1)
        await pool.lease(SandboxSpec())
        await settle(pool, 1)
        make.broken = True
        await pool.lease(SandboxSpec())
        await asyncio.sleep(0.01)
        with pytest.raises(SandboxUnavailable, match="no more boxes"):
            await pool.lease(SandboxSpec())
        await pool.close()

    asyncio.run(main())
