"""Rows in tiles: each once, with its own count and list, whatever the batch looks like."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kernels.impl.portable.tiles import BATCH, ROWS, cut

RUNS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=20)


@given(runs=RUNS)
def test_every_row_has_one_place_and_bounds_hold(runs: list[tuple[int, int]]) -> None:
    lengths = [length for length, _ in runs]
    starts = np.repeat(np.cumsum([length + before for length, before in runs]), lengths)
    counts = np.concatenate([before + 1 + np.arange(length) for length, before in runs]).astype(np.int32)
    tiles = cut(starts, counts, torch.device("cpu"))
    seen = []
    for batch in tiles.batches():
        assert batch.rows_BR.shape == (BATCH, ROWS)
        assert (batch.least, batch.most) == (int(batch.counts_BR.min()), int(batch.counts_BR.max()))
        rows, valid = batch.rows_BR.numpy(), batch.valid_BR.numpy().astype(bool)
        assert (starts[rows] == batch.starts_B.numpy()[:, None]).all()
        assert (counts[rows] == batch.counts_BR.numpy()).all()
        seen.append(np.where(valid, rows, -1).reshape(-1))
    places = np.concatenate(seen)
    assert sorted(places[places >= 0].tolist()) == list(range(len(starts)))
    assert (places[tiles.places_T.numpy()] == np.arange(len(starts))).all()
