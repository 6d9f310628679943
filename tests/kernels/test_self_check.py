"""The check at the start: it holds for the exact operations here, and sees what varies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.kernels import self_check
from tandem.kernels.ops import Ops
from tandem.kernels.self_check import Uses


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


GEMMA = Uses(head_dim=16, queries=2, window=7, activation="gelu_tanh", offset=True)
MIXTURE = Uses(head_dim=16, routed=True, shapes=((48, 80),))


class Rounded(Ops):
    """Operations that add in another order for few rows, as libraries do."""

    def linear(self, x_TK, weight_NK, bias_N=None):
        if x_TK.shape[0] == 7:
            half = x_TK.shape[1] // 2
            return super().linear(x_TK[:, :half], weight_NK[:, :half]) + super().linear(
                x_TK[:, half:], weight_NK[:, half:]
            )
        return super().linear(x_TK, weight_NK, bias_N)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("uses", [None, GEMMA, MIXTURE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_operations_are_exact_here(dtype, uses, portable, threads):
    assert self_check.varying(Ops("exact", "cpu", portable=portable), dtype, uses) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operation_that_varies_is_named_with_its_case(dtype):
    found = self_check.varying(Rounded("exact", "cpu"), dtype)
    for num_in, num_out in self_check.SHAPES:
        assert f"linear {num_in} to {num_out} of 7 rows" in found
    assert all(each.endswith("of 7 rows") for each in found)


@pytest.mark.parametrize(
    ("operation", "uses", "named"),
    [
        ("rms_norm", GEMMA, "norm"),
        ("gelu_mul", GEMMA, "gate"),
        ("silu_mul", MIXTURE, "gate"),
        ("rope", GEMMA, "rotation"),
        ("attention", GEMMA, "attention in a window of 7"),
        ("token_logprobs", None, "log-probability"),
        ("logits", None, "draw"),
        ("linear", MIXTURE, "router"),
        ("linear", MIXTURE, "linear 48 to 80"),
    ],
)
def test_each_operation_of_a_family_is_looked_at(monkeypatch, operation, uses, named):
    """Each gets rows that are a little other where there are eleven of them."""
    ops = Ops("exact", "cpu")
    right = getattr(ops, operation)

    def off(x, *rest, **options):
        out = right(x, *rest, **options)
        if x.shape[0] != 11:
            return out
        return (out[0] * (1 + 1e-6), *out[1:]) if isinstance(out, tuple) else out + (out.abs() * 0.02 + 1e-6)

    monkeypatch.setattr(ops, operation, off)
    assert f"{named} of 11 rows" in self_check.varying(ops, torch.float32, uses)
