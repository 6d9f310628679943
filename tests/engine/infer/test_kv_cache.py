"""Blocks: no leak, no double free, a prefix is found while its version and its block live."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.infer.kv_cache import BlockManager, Found, chain_key, root_key
from tandem.engine.infer.tier import Copy, Costs, Move, Tier

SIZE = 4


def keys_of(tokens: list[int], version: int = 0) -> list[bytes]:
    keys, parent = [], root_key(version)
    for begin in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = chain_key(parent, np.array(tokens[begin : begin + SIZE], np.int32))
        keys.append(parent)
    return keys


def index(manager: BlockManager, blocks: list[int], tokens: list[int], version: int = 0) -> None:
    """Register what these blocks hold of ``tokens``; the last one may hold a part."""
    parent = root_key(version)
    for place, block in enumerate(blocks):
        part = np.array(tokens[place * SIZE : (place + 1) * SIZE], np.int32)
        key = chain_key(parent, part)
        manager.register(block, parent, part, key if len(part) == SIZE else None)
        parent = key


def find(manager: BlockManager, tokens: list[int], version: int = 0) -> Found:
    return manager.find(root_key(version), keys_of(tokens, version), np.array(tokens, np.int32))


def test_a_key_names_version_and_every_earlier_token() -> None:
    first = keys_of(list(range(12)))
    assert len(set(first)) == 3
    assert keys_of(list(range(12))) == first
    assert not set(keys_of(list(range(12)), version=1)) & set(first)
    changed = keys_of([9, *range(1, 12)])
    assert not set(changed) & set(first)  # the second and third block hold the same tokens


def test_kept_prefixes_go_last_and_from_their_end() -> None:
    manager = BlockManager(6, SIZE)
    tokens = list(range(12))
    blocks = manager.allocate(3)
    assert blocks is not None
    index(manager, blocks, tokens)
    manager.release(blocks)
    assert manager.num_free == 6
    assert set(manager.allocate(3) or ()).isdisjoint(blocks)  # empty ones first
    assert find(manager, tokens).places == blocks
    assert manager.allocate(1) == [blocks[2]]  # then the tail, so that what is left can still be found
    assert find(manager, tokens).places == blocks[:2]
    assert manager.allocate(3) is None
    assert manager.num_free == 2


def test_holding_a_free_prefix_takes_it_out_of_the_free_ones() -> None:
    manager = BlockManager(2, SIZE)
    block = manager.allocate(1)
    assert block is not None
    index(manager, block, [1, 2, 3, 4])
    manager.release(block)
    assert (manager.num_free, manager.num_idle(block)) == (2, 1)
    manager.hold(block)
    manager.hold(block)
    assert (manager.num_free, manager.num_idle(block)) == (1, 0)
    manager.release(block)
    assert manager.num_free == 1
    manager.release(block)
    with pytest.raises(AssertionError, match="given back twice"):
        manager.release(block)


def test_forgetting_leaves_blocks_with_their_holders() -> None:
    manager = BlockManager(4, SIZE)
    held, free = manager.allocate(1), manager.allocate(1)
    assert held is not None and free is not None
    index(manager, held, [1, 2, 3, 4])
    index(manager, free, [5, 6])
    manager.release(free)
    manager.forget()
    assert find(manager, [1, 2, 3, 4]) == find(manager, [5, 6]) == Found()
    assert manager.num_used == 1
    manager.release(held)
    assert sorted(manager.allocate(4) or ()) == [0, 1, 2, 3]


def test_a_part_of_a_block_is_copied_not_shared() -> None:
    manager = BlockManager(8, SIZE)
    elder = manager.allocate(2)
    assert elder is not None
    index(manager, elder, [1, 2, 3, 4, 5, 6])
    found = find(manager, [1, 2, 3, 4, 5, 9, 9])
    assert (found.places, found.source, found.num_part) == ([elder[0]], elder[1], 1)
    blocks = manager.seat(found, 2, 0, np.array([1, 2, 3, 4, 5, 9, 9], np.int32))
    assert blocks is not None and blocks[0] == elder[0] and blocks[1] != elder[1]
    assert manager.copies == [Copy(Move.WITHIN, elder[1], blocks[1])]
    # The same block, full by now: a younger sequence may leave it at any token.
    index(manager, elder, [1, 2, 3, 4, 5, 6, 7, 8])
    found = find(manager, [1, 2, 3, 4, 5, 6, 7])
    assert (found.source, found.num_part) == (elder[1], 3)
    assert find(manager, [1, 2, 3]).num_part == 3  # and the first one, before its end
    manager.release(blocks)
    manager.release(elder)
    assert manager.num_used == 0


def test_a_copy_never_takes_the_last_room() -> None:
    """The block to copy from may be the one that is needed: then nothing of it is used."""
    manager = BlockManager(2, SIZE)
    block = manager.allocate(1)
    assert block is not None
    index(manager, block, [1, 2])
    manager.release(block)
    found = find(manager, [1, 2, 9, 9, 9])
    assert found.num_part == 2
    blocks = manager.seat(found, 2, 0, np.array([1, 2, 9, 9, 9], np.int32))
    assert blocks is not None and found.num_part == 0 and not manager.copies
    assert manager.seat(Found(), 1, 0, np.array([7], np.int32)) is None
    manager.release(blocks)


def test_what_leaves_the_pool_goes_out_and_comes_back() -> None:
    costs = Costs(SIZE)
    manager = BlockManager(3, SIZE, Tier(2, costs))
    costs.computed(1, 1.0)
    costs.copied(1, 0.001)
    tokens = list(range(12))
    blocks = manager.allocate(3)
    assert blocks is not None
    index(manager, blocks, tokens)
    manager.release(blocks)
    other = manager.allocate(2)
    assert other is not None
    assert [(copy.move, copy.source) for copy in manager.copies] == [(Move.OUT, blocks[2]), (Move.OUT, blocks[1])]
    slots = [copy.target for copy in manager.copies]
    found = find(manager, tokens)
    assert found.places == [blocks[0], ~slots[1], ~slots[0]]
    assert manager.seat(found, 3, 0, np.array(tokens, np.int32)) is None  # no room, and nothing was lost
    manager.release(other)
    manager.copies.clear()
    back = manager.seat(found, 3, 0, np.array(tokens, np.int32))
    assert back is not None
    assert manager.copies == [Copy(Move.IN, slots[1], back[1]), Copy(Move.IN, slots[0], back[2])]
    assert find(manager, tokens).places == back
    manager.release(back)
    manager.forget()
    assert find(manager, tokens) == Found()


class Blocks(RuleBasedStateMachine):
    """Random sequences that allocate, share, fork, index, swap and give back, against the contents of every block: what
    is found must be what was written, and no block is lost or given twice."""

    def __init__(self) -> None:
        super().__init__()
        costs = Costs(SIZE)
        costs.computed(1, 1.0)
        costs.copied(1, 0.001)
        self.manager = BlockManager(10, SIZE, Tier(4, costs))
        self.holders: list[tuple[list[int], list[int]]] = []
        self.version = 0
        self.pool: dict[int, list[tuple[int, ...]]] = {}  # at each token of a block: everything up to it
        self.outside: dict[int, list[tuple[int, ...]]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18), indexed=st.booleans(), spare=st.integers(0, 2))
    def sit(self, tokens: list[int], indexed: bool, spare: int) -> None:
        manager = self.manager
        found = find(manager, tokens, self.version)
        free = manager.num_free
        blocks = manager.seat(found, manager.blocks_for(len(tokens)), spare, np.array(tokens, np.int32))
        if blocks is None:
            assert not manager.copies and manager.num_free == free
            return
        held = {block for each, _ in self.holders for block in each}
        shared = {place for place in found.places if place >= 0}
        assert len(set(blocks)) == len(blocks) and not (set(blocks) - shared) & held
        for copy in manager.copies:
            into = self.outside if copy.move is Move.OUT else self.pool
            into[copy.target] = list((self.outside if copy.move is Move.IN else self.pool)[copy.source])
        manager.copies.clear()
        begin = len(found.places) * SIZE + found.num_part
        for place in range(begin):
            written = self.pool[blocks[place // SIZE]][place % SIZE]
            assert written == (self.version, *tokens[: place + 1]), "found and not there"
        for place in range(begin, len(tokens)):
            block = self.pool.setdefault(blocks[place // SIZE], [])
            block[place % SIZE :] = [(self.version, *tokens[: place + 1])]
        if indexed:
            index(manager, blocks, tokens, self.version)
        self.holders.append((blocks, tokens))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def stand(self, data: st.DataObject) -> None:
        blocks, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.manager.release(blocks)

    @rule()
    def update(self) -> None:
        self.version += 1
        self.manager.forget()

    @invariant()
    def count(self) -> None:
        used = {block for blocks, _ in self.holders for block in blocks}
        assert self.manager.num_used == len(used)
        assert self.manager.num_free == 10 - len(used)
        tier = self.manager.tier
        assert tier is not None and tier.num_used + len(tier._free) == tier.num_slots

    def teardown(self) -> None:
        for blocks, _ in self.holders:
            self.manager.release(blocks)
        assert sorted(self.manager.allocate(10) or ()) == list(range(10))


TestBlocks = Blocks.TestCase
