"""Blocks outside the pool, in CPU memory: what is put there, and whether that is worth a copy.

Owns: the slots of the tier, the order in which they are given up, and the measured costs of computing and copying.
Refuses: tensors and clocks (times are told). On a machine whose pool is in CPU memory too, a larger pool does the
same without copies; there the tier serves to test what an accelerator needs.
Invariants: a key has one slot at most; a pinned slot is not given up. A block leaves the pool only when its room is
needed, so what waits for a tool is kept while there is room, and then swapped or dropped, whichever costs less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_RECENT = 1 / 32  # weight of the newest measurement; one strange step in a hundred must not turn a decision
_LEAST_RETURNED = 1 / 64  # below it a few more are tried, or nothing could ever show that they return now


class Move(Enum):
    WITHIN = "within"  # block to block
    OUT = "out"  # block to slot of the tier
    IN = "in"  # slot of the tier to block


@dataclass(frozen=True, slots=True)
class Copy:
    """Keys and values of one whole block, from ``source`` to ``target``."""

    move: Move
    source: int
    target: int


class Costs:
    """What a token costs to compute again, what a block costs to copy one way, and which part of the blocks that
    are swapped out come back. Without a measurement of both costs nothing is swapped."""

    def __init__(self, block_size: int) -> None:
        self.compute_s: float | None = None  # a token
        self.copy_s: float | None = None  # a block
        self.returned = 1.0
        self._block_size = block_size

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of mostly prompt tokens took so long."""
        self.compute_s = _blend(self.compute_s, seconds / num_tokens)

    def copied(self, num_blocks: int, seconds: float) -> None:
        """So many blocks went out or in."""
        self.copy_s = _blend(self.copy_s, seconds / num_blocks)

    def ended(self, *, returned: bool) -> None:
        """A swapped block came back, or was given up."""
        self.returned = max(_LEAST_RETURNED, self.returned + _RECENT * (returned - self.returned))

    @property
    def swapping_pays(self) -> bool:
        """One copy out, and one in if it returns, against computing the block again if it is asked for."""
        if self.compute_s is None or self.copy_s is None:
            return False
        return (1 + self.returned) * self.copy_s < self.returned * self._block_size * self.compute_s


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + _RECENT * (now - before)


class Tier:
    """``num_slots`` slots for blocks, by key; the longest unused are given up for new ones."""

    def __init__(self, num_slots: int, costs: Costs) -> None:
        self.costs = costs
        self.num_slots = num_slots
        self.num_out = self.num_in = self.num_dropped = 0  # blocks since the start
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._key_of: dict[int, bytes] = {}
        self._pinned: frozenset[int] = frozenset()

    @property
    def num_used(self) -> int:
        return len(self._slot_of)

    def find(self, key: bytes) -> int | None:
        """The slot of a block, which counts as used now."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._slot_of.move_to_end(key)
        return slot

    def put(self, key: bytes) -> int | None:
        """A slot for a block that leaves the pool; None: it is there already, or it is dropped, because that costs
        less or all slots are about to be read."""
        if key in self._slot_of:
            return None
        if not self.costs.swapping_pays:
            self.num_dropped += 1
            return None
        if not self._free:
            oldest = next((each for each, slot in self._slot_of.items() if slot not in self._pinned), None)
            if oldest is None:
                self.num_dropped += 1
                return None
            self._give_up(oldest)
            self.costs.ended(returned=False)
        slot = self._free.pop()
        self._slot_of[key], self._key_of[slot] = slot, key
        self.num_out += 1
        return slot

    def pin(self, slots: Sequence[int]) -> None:
        """Keep these until ``take``."""
        self._pinned = frozenset(slots)

    def take(self, slots: Sequence[int]) -> None:
        """These blocks went back to the pool; their slots are free."""
        self._pinned = frozenset()
        for slot in slots:
            self._give_up(self._key_of[slot])
            self.costs.ended(returned=True)
            self.num_in += 1

    def forget(self) -> None:
        """Give everything up: the weights changed, which says nothing about what would have come back."""
        for key in list(self._slot_of):
            self._give_up(key)

    def _give_up(self, key: bytes) -> None:
        slot = self._slot_of.pop(key)
        del self._key_of[slot]
        self._free.append(slot)
