"""Limits, another policy, and the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from network_pieces import Door, Table, door, server

from tandem.core.boxes import NetworkPolicy
from tandem.sandbox.network.names import Names
from tandem.sandbox.network.policy import Policy

HERE = NetworkPolicy(allow=("127.0.0.1",), private=("127.0.0.1",))


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionError:
        return True


def test_another_policy_cuts_what_it_forbids_and_nothing_else() -> None:
    async def main() -> None:
        async with server(echo=True) as (one, _), server(echo=True) as (two, _), door(HERE) as at:
            (_, first, to_first), (_, second, to_second) = [await at.tunnel(f"127.0.0.1:{each}") for each in (one, two)]
            at.gate.change(Policy(replace(HERE, allow=(f"127.0.0.1:{two}",))))
            assert await ended(first)
            to_second.write(b"still")
            assert await asyncio.wait_for(second.readexactly(5), 30) == b"still"
            assert (await at.tunnel(f"127.0.0.1:{one}"))[0].split()[1] == b"403"
            cut = [each for each in at.told if each.why.startswith("cut by a new policy")]
            assert [each.target for each in cut] == [f"127.0.0.1:{one}"] and at.gate.num_connections == 1
            to_first.close(), to_second.close()

    asyncio.run(main())


def test_more_connections_wait_for_room() -> None:
    async def main() -> None:
        async with server(echo=True) as (port, _), door(replace(HERE, connections=2)) as at:
            held = [await at.tunnel(f"127.0.0.1:{port}") for _ in range(2)]
            third = asyncio.create_task(at.tunnel(f"127.0.0.1:{port}"))
            await asyncio.sleep(0.2)
            assert not third.done() and at.gate.num_connections == 2
            held[0][2].close()
            status, _, writer = await asyncio.wait_for(third, 30)
            assert status.split()[1] == b"200"
            writer.close(), held[1][2].close()

    asyncio.run(main())


def test_bytes_are_counted_and_end() -> None:
    async def main() -> None:
        async with server(echo=True) as (port, heard), door(replace(HERE, total_bytes=100_000)) as at:
            _, reader, writer = await at.tunnel(f"127.0.0.1:{port}")
            writer.write(b"x" * 400_000)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(400_000), 30)
            assert sum(map(len, heard)) <= 100_000
            assert (await at.tunnel(f"127.0.0.1:{port}"))[0].split()[1] == b"403"
            assert any("cut: it has had its 100000 bytes" in each.why for each in at.told)

    asyncio.run(main())


def test_its_end_cuts_all_and_it_may_start_again() -> None:
    async def main() -> None:
        async with server(echo=True) as (port, _):
            at = Door(HERE, Names(Table()))
            for _ in range(2):
                await at.gate.start(at.listen)
                await at.gate.start(at.listen)
                _, reader, _ = await at.tunnel(f"127.0.0.1:{port}")
                at.gate.close()
                at.gate.close()
                assert await ended(reader) and not at.gate.open and at.gate.num_connections == 0
                with pytest.raises(ConnectionRefusedError):
                    await at.connect()

    asyncio.run(main())


def test_a_port_that_is_taken_leaves_nothing_open() -> None:
    async def main() -> None:
        at = Door(HERE, Names(Table()))

        async def listen(port: int, datagrams: bool):
            if datagrams:
                raise OSError(98, "in use")
            return await at.listen(port, datagrams)

        with pytest.raises(OSError, match="in use"):
            await at.gate.start(listen)
        assert not at.gate.open
        with pytest.raises(ConnectionRefusedError):
            await at.connect()

        async def no_low_port(port: int, datagrams: bool):
            if datagrams:
                raise PermissionError(13, "no")
            return await at.listen(port, datagrams)

        await at.gate.start(no_low_port)
        assert at.gate.open and "below 1024" in at.told[0].why
        at.gate.close()
        await asyncio.sleep(0)

    asyncio.run(main())
