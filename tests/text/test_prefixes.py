"""Common beginnings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.types import ids
from tandem.text.prefixes import common_length, longest_shared, num_distinct

STREAMS = st.lists(st.lists(st.integers(0, 2), max_size=8).map(ids), max_size=6)


@given(STREAMS)
def test_distinct_tokens_are_the_nodes_of_the_tree_of_streams(streams) -> None:
    nodes = {tuple(stream[: i + 1]) for stream in streams for i in range(len(stream))}
    assert num_distinct(streams) == len(nodes)


def test_the_longest_and_first_is_chosen() -> None:
    earlier = [ids([1]), ids([1, 2, 3]), ids([1, 2, 4])]
    assert longest_shared(ids([1, 2, 9]), earlier).parent == 1
    assert longest_shared(ids([1, 2, 9]), earlier).length == 2
    assert longest_shared(ids([7]), earlier).parent == -1
    assert common_length(ids(), ids([1])) == 0
