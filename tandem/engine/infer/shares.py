"""Whose turn it is: the tokens of a busy engine in equal shares between lines of requests.

Owns: how many tokens each account has had. Refuses: requests, blocks, clocks.
Start-time fair queueing (Goyal, Vin and Cheng 1996) with the true cost charged as it arises: the account that has had
the least goes next. Invariants: among accounts that always want more, none is further behind another than one charge
of each, divided by its weight; so each of them gets its turn. An account that wants nothing saves nothing up, and
what was taken while nobody waited is no debt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MOST_PRIORITY = 16  # either way; a share of 1 in 65,536 is next to nothing already

MOST_REMEMBERED = 64  # accounts without requests, before those that the clock has passed are forgotten


class Account(NamedTuple):
    """Who is charged. A step of ``priority`` doubles the weight."""

    group: str
    priority: int


class Shares:
    """Virtual time of each account that has requests: tokens it was charged, divided by its weight."""

    def __init__(self) -> None:
        self._virtual: dict[Account, float] = {}
        self._members: dict[Account, int] = {}
        self._clock = 0.0  # where a newcomer starts
        self._weight = 0.0  # of all accounts with requests

    def enter(self, account: Account) -> None:
        """One more request."""
        if account not in self._members:
            self._weight += 2.0**account.priority
        self._members[account] = self._members.get(account, 0) + 1
        if len(self._virtual) > 2 * len(self._members) + MOST_REMEMBERED:
            for each, virtual in list(self._virtual.items()):
                if each not in self._members and virtual <= self._clock:
                    del self._virtual[each]
        self._virtual[account] = max(self._virtual.get(account, 0.0), self._clock)

    def leave(self, account: Account) -> None:
        """One request less."""
        self._members[account] -= 1
        if not self._members[account]:
            self._weight -= 2.0**account.priority
            del self._members[account]  # what it had beyond its share is remembered until the clock has passed it

    def settle(self) -> None:
        """Nobody waits for anything: whoever had more than others took it from nobody."""
        self._virtual = dict.fromkeys(self._members, 0.0)
        self._clock = 0.0

    def charge(self, account: Account, num_tokens: int) -> None:
        self._virtual[account] += num_tokens / 2.0**account.priority
        # It goes on with every token, so that a stream of newcomers cannot keep anybody behind them for good.
        self._clock += num_tokens / self._weight

    def turn(self, accounts: Iterable[Account]) -> Account:
        """Which of these goes next. Of equal ones the first."""
        chosen = min(accounts, key=self._virtual.__getitem__)
        self._clock = max(self._clock, self._virtual[chosen])
        return chosen
