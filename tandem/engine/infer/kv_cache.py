"""Blocks of the KV cache: who holds them, and which of them hold a prefix that can be used again.

Owns: reference counts, the prefix index, the order of reuse. Refuses: tensors (a block is a number; what must be
copied is said, see ``copies``).
Invariants: a block is free (no holder) or held; a free block may keep a prefix until it is needed. A key chains
weight version and every token from the start, so equal keys mean equal keys and values. A block whose prefix was
written under more than one version never gets a key. A block with more than one reader is never written: who goes on
inside it gets a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from tandem.engine.infer.tier import Copy, Move, Tier

MOST_COMPARED = 32  # blocks behind one prefix whose tokens are compared with a sequence's, the newest first


def chain_key(parent: bytes, tokens: np.ndarray) -> bytes:
    """Key of a block of these tokens behind the block with key ``parent``."""
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def root_key(version: int) -> bytes:
    """What the first block of every prefix under ``version`` stands behind."""
    return blake2b(b"version %d" % version, digest_size=16).digest()


@dataclass(slots=True)
class Found:
    """What of a sequence is there: its first full blocks (``places``: a block's number, or ``~slot`` of one outside
    the pool) with their ``keys``, and a block whose first ``num_part`` tokens are the next ones."""

    places: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    source: int | None = None
    num_part: int = 0


@dataclass(slots=True)
class _Entry:
    """An indexed block: the ``tokens`` in it behind ``parent``; a ``key`` once it is full."""

    parent: bytes
    tokens: np.ndarray
    key: bytes | None = None

    @property
    def bucket(self) -> tuple[bytes, int]:
        return self.parent, int(self.tokens[0])


class BlockManager:
    """Reference-counted blocks, ``0 .. num_blocks - 1``, with a prefix index and, maybe, a tier below the pool.

    ``copies``: what must be copied, in this order, before anything is written to the pool; the caller empties it.
    """

    def __init__(self, num_blocks: int, block_size: int, tier: Tier | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        self.copies: list[Copy] = []
        self._holders = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, nothing worth keeping
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with a prefix; the longest unused first
        self._entries: dict[int, _Entry] = {}
        self._by_key: dict[bytes, int] = {}
        self._beginnings: dict[tuple[bytes, int], list[int]] = {}  # by parent and first token; the newest last

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
        the longest unused first; a full block's goes to the tier below, if that is worth a copy."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                key = self._drop_entry(block).key
                if key is not None and self.tier is not None and (slot := self.tier.put(key)) is not None:
                    self.copies.append(Copy(Move.OUT, block, slot))
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def find(self, root: bytes, keys: Sequence[bytes], tokens: np.ndarray) -> Found:
        """The longest prefix of ``tokens`` that is there, whose full blocks have ``keys`` behind ``root``. Nobody
        holds it for it (see ``seat``)."""
        found = Found()
        parent = root
        for key in keys:
            place = self._by_key.get(key)
            if place is None and self.tier is not None and (slot := self.tier.find(key)) is not None:
                place = ~slot
            if place is None:
                break
            found.places.append(place)
            found.keys.append(key)
            found.parents.append(parent)
            parent = key
        begin = len(found.places) * self.block_size
        rest = tokens[begin : begin + self.block_size]
        if len(rest):
            for block in self._beginnings.get((parent, int(rest[0])), ())[: -MOST_COMPARED - 1 : -1]:
                count = common_length(self._entries[block].tokens, rest)
                if count > found.num_part:
                    found.source, found.num_part = block, count
        return found

    def seat(self, found: Found, count: int, spare: int, tokens: np.ndarray) -> list[int] | None:
        """``count`` blocks for a sequence that begins with ``found``, so that ``spare`` free ones are left; None if
        there are not so many. ``found.num_part`` is 0 afterwards where the copy of a part found no room."""
        shared = [place for place in found.places if place >= 0]
        need = count - len(shared) + spare
        if found.source is not None and self.num_free - self.num_idle([*shared, found.source]) < need:
            found.source, found.num_part = None, 0  # the source may be the very block that is needed
        if self.num_free - self.num_idle(shared) < need:
            return None
        self.hold(shared)
        if found.source is not None:
            self.hold([found.source])
        outside = [~place for place in found.places if place < 0]
        if self.tier is not None:
            self.tier.pin(outside)
        fresh = self.allocate(count - len(shared))
        assert fresh is not None
        given = iter(fresh)
        blocks = [place if place >= 0 else next(given) for place in found.places]
        for index, place in enumerate(found.places):
            if place < 0:
                self.copies.append(Copy(Move.IN, ~place, blocks[index]))
                begin = index * self.block_size
                part = tokens[begin : begin + self.block_size]
                self.register(blocks[index], found.parents[index], part, found.keys[index])
        if self.tier is not None:
            self.tier.take(outside)
        blocks += given
        if found.source is not None:
            self.copies.append(Copy(Move.WITHIN, found.source, blocks[len(found.places)]))
            self.release([found.source])
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of them are free now: holding them lowers ``num_free`` by so many."""
        return sum(1 for block in blocks if not self._holders[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """Become one more holder of indexed blocks."""
        for block in blocks:
            if not self._holders[block]:
                del self._kept[block]
            self._holders[block] += 1

    def register(self, block: int, parent: bytes, tokens: np.ndarray, key: bytes | None = None) -> None:
        """Index the computed ``tokens`` of a held block behind ``parent``; with its ``key`` if it is full. What is
        indexed already stays with its block."""
        assert self._holders[block], f"block {block} is indexed without a holder"
        if key is not None and self._by_key.setdefault(key, block) != block:
            if block in self._entries:  # a beginning that its elder, full, has too
                self._drop_entry(block)
            return
        entry = self._entries.get(block)
        if entry is None:
            bucket = self._beginnings.get((parent, int(tokens[0])), ())
            if key is None and any(
                common_length(self._entries[other].tokens, tokens) == len(tokens) for other in bucket[-MOST_COMPARED:]
            ):
                return
            entry = self._entries[block] = _Entry(parent, tokens.copy(), key)
            self._beginnings.setdefault(entry.bucket, []).append(block)
        elif len(tokens) > len(entry.tokens) or key is not None:
            entry.tokens, entry.key = tokens.copy(), key

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, in the order of their tokens; the last ones are reused first."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is given back twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._entries:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def forget(self) -> None:
        """Drop the whole index: nothing can be found any more. Holders keep what they hold."""
        self._by_key.clear()
        self._entries.clear()
        self._beginnings.clear()
        self._empty += self._kept
        self._kept.clear()
        if self.tier is not None:
            self.tier.forget()

    def _drop_entry(self, block: int) -> _Entry:
        entry = self._entries.pop(block)
        if entry.key is not None:
            del self._by_key[entry.key]
        bucket = self._beginnings[entry.bucket]
        bucket.remove(block)
        if not bucket:
            del self._beginnings[entry.bucket]
        return entry


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count
