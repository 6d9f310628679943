"""Which keys each row of an attention call sees.

Owns: the key lists, and what kernels derive from them, made once for all layers of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.kernels.impl.portable.tiles import Tiles, cut


@dataclass(frozen=True)
class KeyIndex:
    """Row t sees, in order, ``slots_L[starts_T[t] : starts_T[t] + counts_T[t]]``. ``host``: starts and counts in CPU
    memory, where they were made; without it they are read from the device when they are needed."""

    slots_L: Tensor  # int32
    starts_T: Tensor  # int64
    counts_T: Tensor  # int32
    host: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)
    _readers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    _tiles: list[Tiles] = field(default_factory=list, repr=False, compare=False)

    def readers(self, num_slots: int, window: int) -> tuple[Tensor, Tensor]:
        """The index turned round: the rows that list each slot (int32), in order, and where each slot's rows
        begin (int64, ``num_slots + 1``)."""
        if window not in self._readers:
            counts, device = self.counts_T.long(), self.counts_T.device
            seen = counts.clamp(max=window) if window else counts
            rows = torch.repeat_interleave(torch.arange(len(counts), device=device), seen)
            before = torch.cumsum(seen, 0) - seen
            places = torch.arange(len(rows), device=device) - before[rows] + (self.starts_T + counts - seen)[rows]
            slots = self.slots_L[places].long()
            order = torch.argsort(slots, stable=True)
            starts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
            torch.cumsum(torch.bincount(slots, minlength=num_slots), 0, out=starts[1:])
            self._readers[window] = rows[order].int(), starts
        return self._readers[window]

    def tiles(self) -> Tiles:
        """The rows in tiles of one shape."""
        if not self._tiles:
            starts_T, counts_T = self.host or (self.starts_T, self.counts_T)
            self._tiles.append(cut(starts_T.cpu().numpy(), counts_T.cpu().numpy(), self.slots_L.device))
        return self._tiles[0]
