"""Products in whole numbers of 8 bits: those of the definition, bit for bit, with whatever instructions there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels.impl.cpu import build, projection, whole

pytestmark = pytest.mark.skipif(build.library() is None, reason="the C kernels cannot be built here")


def rows(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=[0, projection.TILES, projection.PAIRS], ids=["plain", "tiles", "quads"])
def road(request: pytest.FixtureRequest) -> int:
    library = build.library()
    assert library is not None
    ready = {projection.TILES: "tiles_ready", projection.PAIRS: "whole_quads_ready"}.get(request.param)
    if ready is not None and not getattr(library, ready)():
        pytest.skip("this machine has no such instructions")
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 32), (40, 17), (576, 100), (96, 530)])
def test_products_are_those_of_the_definition_for_every_number_of_rows(road, threads, num_in, num_out):
    weight, x = rows(num_out, num_in, 1), rows(79, num_in)
    x[3] = 0
    packed = whole.pack(weight)
    right = whole.reference(x, *whole.parts_of(packed, num_out, num_in))
    for count in (1, 2, 3, 4, 5, 7, 15, 16, 17, 33, 64):
        part = slice(3, 3 + count)
        out = whole.linear(x[part], packed, num_out, road=road)
        assert torch.equal(out, right[part]), count
        assert torch.equal(whole.linear(x[part], packed, num_out, road=road, wide=True), out.float())
    exact = x.double() @ weight.double().T
    assert (right.double() - exact).abs().mean() < 0.01 * exact.abs().mean()


def test_weights_come_back_within_half_a_step():
    weight = rows(33, 70, 2)
    weight[5] = 0
    numbers, scales = whole.parts_of(whole.pack(weight), 33, 70)
    assert numbers.dtype is torch.int8 and int(numbers.min()) >= -127
    steps = (weight.float() - numbers * scales[:, None]).abs()
    assert (steps <= scales[:, None] * 0.5001).all() and not numbers[5].any()
    assert torch.equal(scales, weight.float().abs().amax(1) / 127)


def test_what_is_not_finite_is_not_hidden(road):
    packed, x = whole.pack(rows(32, 64)), rows(3, 64)
    x[1, 7] = torch.inf
    out = whole.linear(x, packed, 32, road=road)
    assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()
    weight = rows(32, 64)
    weight[9, 1] = torch.nan
    with pytest.raises(EngineError, match="not finite in 1 of them"):
        whole.pack(weight)
