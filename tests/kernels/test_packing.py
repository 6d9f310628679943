"""Packed copies: made of the present bytes, summed, and found out when a bit of theirs changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels.impl.cpu import build, projection
from tandem.kernels.moving import sums_of
from tandem.kernels.packing import Packing

pytestmark = pytest.mark.skipif(build.library() is None, reason="the C kernels cannot be built here")


def weight(num_out: int = 48, num_in: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rearranged(weight_NK: Tensor) -> Tensor:
    """The layout, written down once more."""
    outs, ins = (-(-size // whole) * whole for size, whole in zip(weight_NK.shape, (16, 32), strict=True))
    padded = torch.zeros(outs, ins, dtype=weight_NK.dtype)
    padded[: weight_NK.shape[0], : weight_NK.shape[1]] = weight_NK
    return padded.view(outs // 16, 16, ins // 32, 16, 2).permute(0, 2, 3, 1, 4).reshape(-1)


@pytest.mark.parametrize(
    ("num_out", "num_in"), [(16, 32), (48, 96), (17, 40), (1, 1), (130, 577), (2008, 576), (500, 2080)]
)
def test_the_layout_its_sum_and_its_rows(num_out: int, num_in: int) -> None:
    given = weight(num_out, num_in)
    packed = torch.empty(projection.packed_size(given), dtype=given.dtype)
    sum_8 = projection.pack_into(given, packed)
    assert torch.equal(packed, rearranged(given))
    assert (sum_8 == sums_of([packed])[0]).all()
    ids_T = torch.arange(num_out).flip(0).repeat(3)
    assert torch.equal(projection.rows_of(packed, ids_T, num_in), given[ids_T])


@pytest.mark.parametrize("shape", [(48, 96), (17, 40)])
def test_a_weight_that_is_held_packed_is_nowhere_else(shape: tuple[int, int]) -> None:
    packing, given = Packing(), torch.nn.Parameter(weight(*shape))
    before, place = given.detach().clone(), given.data_ptr()
    packing.hold_in_place(given)
    assert given.shape == before.shape and given.isnan().all()
    packed = packing.of(given, projection.pack)
    assert torch.equal(packed, rearranged(before))
    assert (packed.data_ptr() == place) == (shape == (48, 96))  # filled up, it needs more room
    packing.forget()
    assert packing.of(given, projection.pack) is packed


def test_copies_follow_their_weights_in_the_room_they_had() -> None:
    packing, weights = Packing(), {name: weight(seed=number) for number, name in enumerate("ab")}
    first = packing.renew(weights)
    copy = packing.of(weights["a"], projection.pack)
    weights["a"].mul_(-1.0)
    second = packing.renew(weights)
    assert packing.of(weights["a"], projection.pack) is copy
    assert torch.equal(copy, rearranged(weights["a"]))
    assert (first["b"] == second["b"]).all() and (first["a"] != second["a"]).any()


@pytest.mark.parametrize("is_held", [False, True])
def test_one_bit_in_a_copy_is_found(is_held: bool) -> None:
    packing, weights = Packing(), {name: weight(seed=number) for number, name in enumerate("ab")}
    if is_held:
        packing.hold_in_place(weights["b"])
    packing.renew(weights)
    packing.check(weights)
    packed = packing.of(weights["b"], projection.pack)
    flip = packed.view(torch.uint8).numpy()
    flip[np.random.default_rng(0).integers(len(flip))] ^= 1 << 3
    with pytest.raises(EngineError, match="1 of 2 packed weights are not what was written, first b"):
        packing.check(weights)
    with pytest.raises(EngineError, match="first b"):
        packing.renew(weights)
