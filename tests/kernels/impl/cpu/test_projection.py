"""Projections by packed weights: right, and a row's bits are its own, with each kind of instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tandem.kernels.impl.cpu import projection


def rows(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=[projection.TILES, projection.PAIRS, projection.SINGLES], ids=["tiles", "pairs", "singles"])
def road(request: pytest.FixtureRequest) -> int:
    if not projection.serves(request.param):
        pytest.skip("this machine has no such instructions")
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 32), (40, 17), (576, 100), (96, 2050)])
def test_products_are_right_for_every_number_of_rows(road: int, threads: int, num_in: int, num_out: int) -> None:
    weight = rows(num_out, num_in, 1)
    packed = projection.pack(weight)
    whole = rows(79, num_in)
    all_of_them = projection.linear(whole, packed, num_out, road=road)
    torch.testing.assert_close(all_of_them.double(), whole.double() @ weight.double().T, atol=1e-2, rtol=2**-8)
    for count in (1, 2, 3, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64):
        x = whole[9 : 9 + count]
        out = projection.linear(x, packed, num_out, road=road)
        assert torch.equal(out, all_of_them[9 : 9 + count]), count
        assert torch.equal(projection.linear(x, packed, num_out, road=road, wide=True), out.float())


def test_rows_that_lie_apart_are_read_in_place(road: int) -> None:
    packed, wide = projection.pack(rows(48, 64, 1)), rows(20, 128)
    left = projection.linear(wide[:, :64], packed, 48, road=road)
    assert torch.equal(left, projection.linear(wide[:, :64].clone(), packed, 48, road=road))
