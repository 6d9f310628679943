"""Blocks of the KV cache: who holds them, and which of them hold a prefix that can be used again.

Owns: reference counts, the prefix index, the order of reuse. Refuses: tensors (a block is a number).
Invariants: a block is free (no holder) or held; a free block may keep a prefix until it is needed. A key chains
weight version and every token from the start, so equal keys mean equal keys and values. A block whose prefix was
written under more than one version never gets a key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def chain_key(parent: bytes, tokens: np.ndarray) -> bytes:
    """Key of a full block behind the block with key ``parent``."""
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def root_key(version: int) -> bytes:
    """What the first block of every prefix under ``version`` stands behind."""
    return blake2b(b"version %d" % version, digest_size=16).digest()


class BlockManager:
    """Reference-counted blocks, ``0 .. num_blocks - 1``, with a prefix index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, nothing worth keeping
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with a prefix; the longest unused first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could give now."""
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with nothing in them, or none at all if there are not so many. Kept prefixes go,
        the longest unused first."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                del self._by_key[self._key_of.pop(block)]
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest indexed prefix; nobody holds them for it (see ``hold``)."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of them are free now: holding them lowers ``num_free`` by so many."""
        return sum(1 for block in blocks if not self._holders[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """Become one more holder of matched blocks."""
        for block in blocks:
            if not self._holders[block]:
                del self._kept[block]
            self._holders[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Index a full, computed block. A key that is indexed already stays with its block."""
        assert self._holders[block], f"block {block} is indexed without a holder"
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, in the order of their tokens; the last ones are reused first."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is given back twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def forget(self) -> None:
        """Drop the whole index: no block can be matched any more. Holders keep what they hold."""
        self._by_key.clear()
        self._key_of.clear()
        self._empty += self._kept
        self._kept.clear()
