"""Blocks: no leak, no double free, a prefix is found while its version and its block live."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.infer.kv_cache import BlockManager, chain_key, root_key

SIZE = 4


def keys_of(tokens: list[int], version: int = 0) -> list[bytes]:
    keys, parent = [], root_key(version)
    for begin in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = chain_key(parent, np.array(tokens[begin : begin + SIZE], np.int32))
        keys.append(parent)
    return keys


def test_a_key_names_version_and_every_earlier_token() -> None:
    first = keys_of(list(range(12)))
    assert len(set(first)) == 3
    assert keys_of(list(range(12))) == first
    assert not set(keys_of(list(range(12)), version=1)) & set(first)
    changed = keys_of([9, *range(1, 12)])
    assert not set(changed) & set(first)  # the second and third block hold the same tokens


def test_kept_prefixes_go_last_and_from_their_end() -> None:
    manager = BlockManager(6, SIZE)
    keys = keys_of(list(range(12)))
    blocks = manager.allocate(3)
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        manager.register(block, key)
    manager.release(blocks)
    assert manager.num_free == 6
    assert set(manager.allocate(3) or ()).isdisjoint(blocks)  # empty ones first
    assert manager.match(keys) == blocks
    assert manager.allocate(1) == [blocks[2]]  # then the tail, so that what is left can still be matched
    assert manager.match(keys) == blocks[:2]
    assert manager.allocate(3) is None
    assert manager.num_free == 2


def test_holding_a_free_prefix_takes_it_out_of_the_free_ones() -> None:
    manager = BlockManager(2, SIZE)
    key = keys_of([1, 2, 3, 4])
    block = manager.allocate(1)
    assert block is not None
    manager.register(block[0], key[0])
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
    keys = keys_of(list(range(8)))
    held, free = manager.allocate(1), manager.allocate(1)
    assert held is not None and free is not None
    manager.register(held[0], keys[0])
    manager.register(free[0], keys[1])
    manager.release(free)
    manager.forget()
    assert manager.match(keys) == []
    assert manager.num_used == 1
    manager.release(held)
    assert sorted(manager.allocate(4) or ()) == [0, 1, 2, 3]


class Blocks(RuleBasedStateMachine):
    """Random sequences that allocate, share, index and give back, against a plain count of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(10, SIZE)
        self.holders: list[tuple[list[int], list[bytes]]] = []
        self.version = 0

    @rule(branch=st.integers(0, 2), length=st.integers(1, 5), index=st.booleans())
    def sit(self, branch: int, length: int, index: bool) -> None:
        keys = keys_of([0] * SIZE + [branch] * SIZE * (length - 1), self.version)
        hit = self.manager.match(keys)
        need = length - len(hit)
        if self.manager.num_free - self.manager.num_idle(hit) < need:
            return
        self.manager.hold(hit)
        fresh = self.manager.allocate(need)
        assert fresh is not None and not set(fresh) & set(hit)
        assert not {block for blocks, _ in self.holders for block in blocks} & set(fresh)
        if index:
            for block, key in zip(hit + fresh, keys, strict=True):
                self.manager.register(block, key)
        self.holders.append((hit + fresh, keys))

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

    def teardown(self) -> None:
        for blocks, _ in self.holders:
            self.manager.release(blocks)
        assert sorted(self.manager.allocate(10) or ()) == list(range(10))


TestBlocks = Blocks.TestCase
