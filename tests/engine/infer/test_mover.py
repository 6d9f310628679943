"""Copies of blocks: the outcome of many at once is that of one after the other."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.infer.mover import Mover
from tandem.engine.infer.tier import Copy, Move
from tandem.models.attention import KVCache
from tandem.models.spec import ModelSpec

BLOCKS, SIZE, OUTSIDE = 6, 4, 3
SPEC = ModelSpec(
    family="llama", vocab_size=10, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    intermediate_size=8, max_positions=64,
)  # fmt: skip
COPIES = st.lists(
    st.one_of(
        st.builds(Copy, st.just(Move.WITHIN), st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)),
        st.builds(Copy, st.just(Move.OUT), st.integers(0, BLOCKS - 1), st.integers(0, OUTSIDE - 1)),
        st.builds(Copy, st.just(Move.IN), st.integers(0, OUTSIDE - 1), st.integers(0, BLOCKS - 1)),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(copies=COPIES)
def test_copies_are_done_in_their_order(copies: list[Copy]) -> None:
    cache = KVCache(SPEC, BLOCKS * SIZE, dtype=torch.float32, device="cpu")
    for layer, tensor in enumerate([*cache.keys, *cache.values]):
        tensor.copy_(torch.arange(BLOCKS * SIZE)[:, None, None].expand_as(tensor) + 1000 * layer)
    pool = list(range(BLOCKS))
    outside: list[int | None] = [None] * OUTSIDE
    known = [copy for copy in copies if copy.move is not Move.IN]
    mover = Mover(cache, SIZE, OUTSIDE)
    done: list[Copy] = []
    for copy in copies:
        if copy.move is Move.OUT:
            outside[copy.target] = pool[copy.source]
        elif copy.move is Move.WITHIN:
            pool[copy.target] = pool[copy.source]
        elif (content := outside[copy.source]) is not None:
            pool[copy.target] = content
        else:
            continue  # nothing was ever put there
        done.append(copy)
    spent = mover.move(done)
    assert (spent > 0) == any(copy.move is not Move.WITHIN for copy in done)
    assert len(done) >= len(known)
    expected = torch.tensor([content * SIZE + place for content in pool for place in range(SIZE)])
    for layer, tensor in enumerate([*cache.keys, *cache.values]):
        assert torch.equal(tensor, (expected + 1000 * layer)[:, None, None].expand_as(tensor).float())


def test_what_a_block_costs_is_measured() -> None:
    mover = Mover(KVCache(SPEC, BLOCKS * SIZE, dtype=torch.float32, device="cpu"), SIZE, OUTSIDE)
    assert 0 < mover.measure() < 1
