"""One look-up, judged addresses, and connections to what was judged."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from network_pieces import Table, server

from tandem.core.boxes import NetworkPolicy
from tandem.sandbox.network.attempts import Attempt, Attempts
from tandem.sandbox.network.budget import Budget
from tandem.sandbox.network.names import Names
from tandem.sandbox.network.outlet import Outlet
from tandem.sandbox.network.policy import Policy
from tandem.sandbox.network.refusal import Refused, Unreachable


def outlet(policy: NetworkPolicy, table: Table, told: list[Attempt]) -> Outlet:
    return Outlet(Policy(policy), Names(table), Attempts(told.append), Budget())


def test_a_name_that_leads_inside_is_refused_and_one_that_changes_is_asked_once() -> None:
    class Turncoat(Table):
        async def __call__(self, name: str) -> Sequence[str]:
            await super().__call__(name)
            return ["127.0.0.1"] if len(self.asked) == 1 else ["169.254.169.254"]

    async def main() -> None:
        told: list[Attempt] = []
        async with server(b"hi") as (port, _):
            table = Turncoat(a_org=[])
            way = outlet(NetworkPolicy(allow=("a.org",), private=("127.0.0.1",)), table, told)
            line, _, writer = await way.open("A.org.", port)
            assert str(line.address) == "127.0.0.1" and line.by_name and table.asked == ["a.org"]
            writer.close()
            with pytest.raises(Refused, match="leads to where it may not go: 169.254.169.254 is a metadata"):
                await way.open("a.org", port)
        assert [each.allowed for each in told] == [True, False]

    asyncio.run(main())


def test_of_several_addresses_the_first_allowed_one_is_taken() -> None:
    async def main() -> None:
        table = Table(a_org=["10.0.0.1", "::ffff:169.254.169.254", "127.0.0.1"])
        way = outlet(NetworkPolicy(allow=("a.org",), private=("127.0.0.1",)), table, [])
        line, why = await way.judge("a.org", 80, "a.org:80")
        assert str(line.address) == "127.0.0.1" and why == "allow a.org, at 127.0.0.1"

    asyncio.run(main())


@pytest.mark.parametrize("host", ["b.org", "words.in.labels.evil.org", "127.1", "0x7f000001", "2130706433", "a_.-", ""])
def test_what_no_rule_names_is_never_looked_up(host: str) -> None:
    async def main() -> None:
        told: list[Attempt] = []
        table = Table()
        with pytest.raises(Refused):
            await outlet(NetworkPolicy(allow=("a.org", "1.1.1.1")), table, told).open(host, 80)
        assert table.asked == [] and [each.allowed for each in told] == [False]

    asyncio.run(main())


def test_nobody_there_is_told_as_that() -> None:
    async def main() -> None:
        told: list[Attempt] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            way = outlet(NetworkPolicy(allow=("127.0.0.1", "a.org"), private=("127.0.0.1",)), Table(), told)
            with pytest.raises(Unreachable):
                await way.open("127.0.0.1", port)
            with pytest.raises(Unreachable, match="no address"):
                await way.open("a.org", port)
        assert [each.allowed for each in told] == [True, True]

    asyncio.run(main())


def test_an_address_that_the_resolver_told_counts_as_its_name() -> None:
    async def main() -> None:
        way = outlet(NetworkPolicy(allow=("a.org:443",)), Table(a_org=["1.1.1.1", "2606:4700::1"]), [])
        with pytest.raises(Refused):
            await way.judge("1.1.1.1", 443, "")
        assert [str(each) for each in await way.tell_addresses("A.org", socket.AF_INET)] == ["1.1.1.1"]
        assert [str(each) for each in await way.tell_addresses("a.org", socket.AF_INET6)] == ["2606:4700::1"]
        line, _ = await way.judge("1.1.1.1", 443, "")
        assert line.name == "a.org" and line.by_name
        for host, port in (("1.1.1.1", 80), ("1.1.1.2", 443)):
            with pytest.raises(Refused):
                await way.judge(host, port, "")
        way.policy = Policy(NetworkPolicy(allow=("b.org",)))
        assert not way.judge_again(line).allowed
        with pytest.raises(Refused):
            await way.tell_addresses("a.org", socket.AF_INET)

    asyncio.run(main())
