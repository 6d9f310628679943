"""Names, looked up by the system and by a table."""

from __future__ import annotations

import asyncio

import pytest
from network_pieces import Table

from tandem.sandbox.network.names import Names, NoAddress


def test_the_system_knows_this_machine() -> None:
    async def main() -> None:
        names = Names()
        assert any(str(address) in ("127.0.0.1", "::1") for address in await names.addresses("localhost"))
        names.close()
        names.close()

    asyncio.run(main())


def test_each_address_once_in_its_one_form() -> None:
    async def main() -> None:
        table = Table(a_org=["1.1.1.1", "::ffff:1.1.1.1", "fe80::1%lo", "junk", "::2"], none_org=["fe80::1%lo"])
        assert [str(each) for each in await Names(table).addresses("a.org")] == ["1.1.1.1", "::2"]
        for name in ("none.org", "nowhere.org"):
            with pytest.raises(NoAddress, match=name):
                await Names(table).addresses(name)

    asyncio.run(main())
