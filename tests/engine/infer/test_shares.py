"""Shares: everybody gets a turn, in proportion to the weights, whatever the others do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.infer.shares import MOST_REMEMBERED, Account, Shares

MOST = 50


@given(
    priorities=st.lists(st.integers(-2, 2), min_size=2, max_size=5),
    costs=st.lists(st.integers(1, MOST), min_size=1, max_size=300),
)
def test_who_always_wants_more_is_never_far_behind(priorities: list[int], costs: list[int]) -> None:
    accounts = [Account(str(place), priority) for place, priority in enumerate(priorities)]
    shares = Shares()
    for account in accounts:
        shares.enter(account)
    had = dict.fromkeys(accounts, 0.0)
    for cost in costs:
        account = shares.turn(accounts)
        shares.charge(account, cost)
        had[account] += cost / 2.0**account.priority
        for a in accounts:
            for b in accounts:
                assert had[a] - had[b] <= MOST / 2.0**a.priority


def test_a_newcomer_gets_no_credit_for_its_absence() -> None:
    shares = Shares()
    old, new = Account("old", 0), Account("new", 0)
    shares.enter(old)
    for _ in range(10):
        shares.charge(shares.turn([old]), 100)
    shares.enter(new)
    turns = []
    for _ in range(6):
        turns.append(shares.turn([old, new]))
        shares.charge(turns[-1], 100)
    assert turns.count(new) in (3, 4)


def test_who_comes_back_has_not_been_forgiven() -> None:
    shares = Shares()
    greedy, other = Account("greedy", 0), Account("other", 0)
    shares.enter(greedy)
    shares.enter(other)
    shares.charge(greedy, 1000)
    shares.leave(greedy)
    shares.enter(greedy)
    assert shares.turn([greedy, other]) == other
    shares.settle()  # nobody waited: no debt
    assert shares.turn([greedy, other]) == greedy


def test_an_endless_stream_of_newcomers_starves_nobody_and_leaves_nothing() -> None:
    shares = Shares()
    stays = Account("stays", 0)
    shares.enter(stays)
    turns = 0
    for number in range(1000):
        account = Account(str(number), 0)
        shares.enter(account)
        chosen = shares.turn([stays, account])
        turns += chosen == stays
        shares.charge(chosen, 10)
        shares.leave(account)
    assert turns > 300
    assert len(shares._virtual) <= MOST_REMEMBERED + 3
