"""The check at the start: it holds for the exact operations here, and sees what varies."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tandem.kernels import self_check
from tandem.kernels.ops import Ops


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Rounded(Ops):
    """Operations that add in another order for few rows, as libraries do."""

    def linear(self, x_TK, weight_NK, bias_N=None):
        if x_TK.shape[0] == 7:
            half = x_TK.shape[1] // 2
            return super().linear(x_TK[:, :half], weight_NK[:, :half]) + super().linear(
                x_TK[:, half:], weight_NK[:, half:]
            )
        return super().linear(x_TK, weight_NK, bias_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_operations_are_exact_here(dtype, threads):
    assert self_check.varying(Ops("exact", "cpu"), dtype) == []
    assert self_check.proven("exact", dtype, "cpu") == "exact"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operation_that_varies_is_named_with_its_case(dtype):
    found = self_check.varying(Rounded("exact", "cpu"), dtype)
    assert found == [f"linear {num_in} to {num_out} of 7 rows" for num_in, num_out in self_check.SHAPES]


def test_where_exactness_does_not_hold_it_is_said_and_fast_is_used(monkeypatch, caplog):
    monkeypatch.setattr(self_check, "Ops", Rounded)
    with caplog.at_level(logging.WARNING):
        assert self_check.proven("exact", torch.bfloat16, "cpu") == "fast"
    assert "do not hold" in caplog.text and "of 7 rows" in caplog.text
    caplog.clear()
    assert self_check.proven("fast", torch.bfloat16, "cpu") == "fast"
    assert not caplog.text
