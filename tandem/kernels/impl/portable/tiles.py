"""Rows of an attention call in tiles of one shape.

Owns: which rows share a tile (neighbours that read the same list of keys), and the order of tiles, which puts those
with similarly many keys beside each other. Invariant: the number of tiles is whole batches; what fills a tile or a
batch up repeats something in it, and is marked as not valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROWS, BATCH = 16, 16  # rows of a tile, tiles of a product


@dataclass(frozen=True, slots=True)
class Batch:
    """Tiles of one product. ``least`` and ``most``: the fewest and the most keys that one of its rows sees."""

    rows_BR: Tensor
    counts_BR: Tensor
    valid_BR: Tensor
    starts_B: Tensor
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """All tiles of a call, on its device; ``places_T`` says where in ``[tiles x ROWS]`` each row is."""

    packed_4NR: Tensor  # rows, counts, valid, starts (of the tile, in every place): one transfer
    places_T: Tensor
    bounds: list[tuple[int, int]]

    def batches(self) -> Iterator[Batch]:
        for number, (least, most) in enumerate(self.bounds):
            rows, counts, valid, starts = self.packed_4NR[:, number * BATCH : (number + 1) * BATCH]
            yield Batch(rows, counts, valid, starts[:, 0], least, most)


def cut(starts_T: np.ndarray, counts_T: np.ndarray, device: torch.device) -> Tiles:
    """The tiles of rows whose key lists begin at ``starts_T`` and have ``counts_T`` keys."""
    num_rows = len(starts_T)
    numbers = np.arange(num_rows)
    fresh = np.concatenate([[True], starts_T[1:] != starts_T[:-1]])
    behind = numbers - np.maximum.accumulate(np.where(fresh, numbers, 0))  # rows since the list began
    place_T = behind % ROWS
    tile_T = np.cumsum(place_T == 0) - 1
    first_N = np.flatnonzero(place_T == 0)
    order = np.argsort(np.maximum.reduceat(counts_T, first_N), kind="stable")
    order = np.concatenate([order, np.repeat(order[-1:], -len(order) % BATCH)])
    rank_N = np.empty(len(first_N), np.int64)
    rank_N[order[::-1]] = np.arange(len(order))[::-1]  # of a repeated tile its first place counts
    packed = np.empty((4, len(order), ROWS), np.int64)
    packed[0] = first_N[order][:, None]
    packed[2] = 0
    packed[0, rank_N[tile_T], place_T] = numbers
    packed[2, rank_N[tile_T], place_T] = 1
    packed[1] = counts_T[packed[0]]
    packed[3] = starts_T[packed[0]]
    counts = packed[1].reshape(-1, BATCH * ROWS)
    bounds = list(zip(counts.min(1).tolist(), counts.max(1).tolist(), strict=True))
    places = torch.from_numpy(rank_N[tile_T] * ROWS + place_T)
    return Tiles(torch.from_numpy(packed).to(device), places.to(device), bounds)
