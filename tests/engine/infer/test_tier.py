"""The tier below the pool: what is put there by cost, who is given up for whom."""

from __future__ import annotations

from tandem.engine.infer.tier import Costs, Tier


def costs(compute_s: float = 1.0, copy_s: float = 0.1) -> Costs:
    made = Costs(4)
    made.computed(10, 10 * compute_s)
    made.copied(5, 5 * copy_s)
    return made


def test_nothing_is_swapped_before_both_costs_are_known() -> None:
    unknown = Costs(4)
    assert not unknown.swapping_pays
    unknown.copied(1, 1e-9)
    assert not unknown.swapping_pays
    unknown.computed(1, 1.0)
    assert unknown.swapping_pays


def test_the_cheaper_way_is_taken() -> None:
    """A block of 4 tokens: 4 times a token's computation against two copies while every block returns."""
    assert costs(1.0, 1.9).swapping_pays
    assert not costs(1.0, 2.1).swapping_pays
    assert Tier(2, costs(1.0, 2.1)).put(b"a") is None
    rare = costs(1.0, 1.0)
    for _ in range(200):
        rare.ended(returned=False)
    assert not rare.swapping_pays  # a copy for each, a gain for few
    for _ in range(200):
        rare.ended(returned=True)
    assert rare.swapping_pays


def test_one_strange_step_turns_no_decision() -> None:
    one = costs(1.0, 0.5)
    one.copied(1, 10.0)
    assert one.swapping_pays


def test_the_longest_unused_is_given_up_but_never_a_pinned_one() -> None:
    tier = Tier(2, costs())
    a, b = tier.put(b"a"), tier.put(b"b")
    assert a is not None and b is not None and a != b
    assert tier.find(b"a") == a  # used now
    assert tier.put(b"c") == b and tier.find(b"b") is None
    tier.pin([a])
    assert tier.put(b"d") == b and tier.find(b"c") is None
    tier.pin([a, b])
    assert tier.put(b"e") is None and tier.find(b"e") is None
    tier.take([a, b])
    assert (tier.num_used, tier.num_in, tier.num_out, tier.num_dropped) == (0, 2, 4, 1)
    assert tier.put(b"f") is not None
    assert tier.put(b"f") is None  # it is there
    tier.forget()
    assert tier.num_used == 0 and tier.find(b"f") is None
