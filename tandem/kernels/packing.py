"""Copies of weights in the layouts that kernels read, and weights that are held in such a layout alone.

Owns: the copies, when they are made again, and the sums of their bytes. Refuses: choosing a layout.
Invariants: a copy belongs to the bytes that its weight has now; a weight that is held packed has no other copy, and
who reads it in its own layout reads NaN, not old numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tandem.core.errors import EngineError
from tandem.kernels.impl.cpu import projection
from tandem.kernels.moving import sums_of


@dataclass(frozen=True, slots=True)
class _Copy:
    state: tuple[int, int]  # the weight's, when the copy was made
    packed: Tensor
    sum_8: np.ndarray | None  # of its bytes, taken while they were written; None: nobody did


def _state(weight: Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()


class Layout(Protocol):
    """A module that knows one layout."""

    def packed_size(self, weight_NK: Tensor, /) -> int: ...

    def pack_into(self, weight_NK: Tensor, packed: Tensor, /) -> np.ndarray: ...


class Packing:
    """The packed copies of one op table, by weight; ``layout`` is that of those which are renewed. They are of
    ``dtype``."""

    def __init__(self, layout: Layout = projection, dtype: torch.dtype = torch.bfloat16) -> None:
        self._layout, self._dtype = layout, dtype
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: object) -> Packing:
        """A copy of a model packs its own weights.

        Raises:
            EngineError: its weights are here alone.
        """
        if len(self._held):
            raise EngineError("a model whose weights are held packed cannot be copied")
        return Packing(self._layout, self._dtype)

    def of(self, weight: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
        """The copy of a weight, made by ``pack`` where there is none of its present bytes."""
        if (held := self._held.get(weight)) is not None:
            return held.packed
        kept = self._copies.get(weight)
        if kept is None or kept.state != _state(weight):
            kept = _Copy(_state(weight), pack(weight.detach()), None)
            self._copies[weight] = kept
        return kept.packed

    def forget(self) -> None:
        """Drop all copies; what is held packed stays, for there is nothing else to make it from."""
        self._copies.clear()

    def is_held(self, weight: Tensor) -> bool:
        """Whether the weight exists in packed form alone."""
        return weight in self._held

    def put(self, weight: Tensor, packed: Tensor) -> None:
        """Have ``packed`` be the copy of the weight's present bytes."""
        self._copies[weight] = _Copy(_state(weight), packed, sums_of([packed])[0])

    def hold(self, weight: Tensor, packed: Tensor, sum_8: np.ndarray | None = None) -> None:
        """Have ``packed`` be the weight from now on; its own memory is let go."""
        nothing = torch.full((1, 1), torch.nan, dtype=weight.dtype)
        weight.data = nothing.expand(weight.shape)
        torch.autograd.graph.increment_version([weight])
        self._copies.pop(weight, None)
        self._held[weight] = _Copy(_state(weight), packed, sum_8)

    def hold_in_place(self, weight: Tensor) -> None:
        """Bring a bfloat16 weight into the layout, in its own memory where that fits."""
        size = self._layout.packed_size(weight)
        fits = size == weight.numel() and self._dtype is weight.dtype and weight.is_contiguous()
        room = weight.data.view(-1) if fits else torch.empty(size, dtype=self._dtype)
        self.hold(weight, room, self._layout.pack_into(weight.detach(), room))

    def renew(self, weights: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Have a copy of the present bytes of all these bfloat16 weights; returns their sums by name, ``[8]`` uint64,
        each compared with what lies in memory. Room is used again; a copy that failed is not kept.

        Raises:
            EngineError: a copy is not what was written: one of before, or one of now.
        """
        self.check(weights)
        sums: dict[str, np.ndarray] = {}
        for name, weight in weights.items():
            kept = self._held.get(weight) or self._copies.pop(weight, None)
            if kept is None or kept.sum_8 is None or (kept.state != _state(weight) and not self.is_held(weight)):
                size = self._layout.packed_size(weight)
                packed = torch.empty(size, dtype=self._dtype) if kept is None else kept.packed
                is_held = self.is_held(weight)
                sum_8 = sums_of([packed])[0] if is_held else self._layout.pack_into(weight.detach(), packed)
                kept = _Copy(_state(weight), packed, sum_8)
            (self._held if self.is_held(weight) else self._copies)[weight] = kept
            assert kept.sum_8 is not None
            sums[name] = kept.sum_8
        self.check(weights)
        return sums

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Compare all copies that there are with their sums.

        Raises:
            EngineError: names the first whose bytes are others.
        """
        kept = {name: self._held.get(weight) or self._copies.get(weight) for name, weight in weights.items()}
        known = {name: copy for name, copy in kept.items() if copy is not None and copy.sum_8 is not None}
        now_N8 = sums_of([copy.packed for copy in known.values()])
        wrong = [name for (name, copy), sum_8 in zip(known.items(), now_N8, strict=True) if (sum_8 != copy.sum_8).any()]
        if wrong:
            raise EngineError(
                f"{len(wrong)} of {len(known)} packed weights are not what was written, first {wrong[0]}",
                hint="bits changed in memory: what was sampled since the last publish is in doubt; test this machine",
            )
