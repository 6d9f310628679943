"""Copies with sums: every byte arrives, and every wrong one is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.kernels.moving import PORTION_BYTES, ROW_BYTES, copy_summed, reference_sum, sums_of


def made(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, PORTION_BYTES * 2 + 777])
@pytest.mark.parametrize("offset", [0, 8])
def test_the_copy_is_whole_and_its_sum_is_the_definition(count: int, offset: int) -> None:
    source, target = made(count), torch.zeros(count + offset, dtype=torch.uint8)[offset:]
    (total,) = copy_summed([(source, target)])
    assert torch.equal(source, target)
    assert (total == reference_sum(source.numpy())).all() and (total == sums_of([target])[0]).all()


def test_each_tensor_has_its_own_sum_whatever_its_type() -> None:
    sources = [torch.randn(33, 7), torch.randn(5, dtype=torch.bfloat16), torch.randn(2, 3, 64)]
    targets = [torch.empty_like(source) for source in sources]
    sums = copy_summed(list(zip(sources, targets, strict=True)))
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))
    assert (sums == sums_of(targets)).all() and len({tuple(each) for each in sums.tolist()}) == 3


@given(count=st.integers(1, 700), data=st.data())
def test_any_changed_byte_and_any_two_swapped_rows_are_found(count: int, data: st.DataObject) -> None:
    buffer = made(count)
    before = sums_of([buffer])[0]
    place, change = data.draw(st.integers(0, count - 1)), data.draw(st.integers(1, 255))
    buffer[place] ^= change
    assert (sums_of([buffer])[0] != before).any()
    buffer[place] ^= change
    if count >= 2 * ROW_BYTES:
        moved = torch.cat([buffer[ROW_BYTES : 2 * ROW_BYTES], buffer[:ROW_BYTES], buffer[2 * ROW_BYTES :]])
        assert (sums_of([moved])[0] != before).any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        sums_of([torch.zeros(4, 4).t()[:2]])
    with pytest.raises(ValueError, match="into 3"):
        copy_summed([(made(4), made(3))])
