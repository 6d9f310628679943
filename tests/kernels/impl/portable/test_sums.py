"""Sums in a written order."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.impl.portable.sums import folded_sum, pyramid


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 576, 1000])
def test_a_folded_sum_is_the_sum_and_a_row_s_own(size: int) -> None:
    x = torch.randn(33, size, generator=torch.Generator().manual_seed(0))
    before, found = x.clone(), folded_sum(x)
    torch.testing.assert_close(found[:, 0].double(), x.double().sum(1), atol=1e-4, rtol=1e-5)
    assert torch.equal(x, before)
    for row in range(33):
        assert torch.equal(folded_sum(x[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("size", [1, 5, 8, 33])
def test_a_pyramid_ends_in_the_sum_of_all(size: int) -> None:
    x = torch.rand(4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    levels = pyramid(x)
    torch.testing.assert_close(levels[-1][:, 0], x.sum(1))
    for fine, coarse in zip(levels, levels[1:], strict=False):
        assert torch.equal(fine[:, 0::2] + fine[:, 1::2], coarse)
