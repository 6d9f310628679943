"""The mixture of experts: a row's bits are its own, and the sums are those written down."""

from __future__ import annotations

import pytest
import torch

from tandem.core.errors import ModelError
from tandem.kernels.ops import Ops
from tandem.models.experts import Mixture
from tandem.models.spec import ExpertSpec, ModelSpec

SIZES = dict(
    family="qwen3_moe", vocab_size=32, hidden_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, max_positions=64,
)  # fmt: skip


def mixture(dtype: torch.dtype, *, per_token: int = 3, normalised: bool = True) -> Mixture:
    experts = ExpertSpec(num_experts=9, per_token=per_token, intermediate_size=40, normalised=normalised)
    made = Mixture(
        ModelSpec(**SIZES, experts=experts), 0, Ops("exact", "cpu"), dtype=dtype, device=torch.device("cpu")
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return made


def rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype):
    model, x = mixture(dtype), rows(150, dtype)
    trained = model(x).detach()
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(model(x[order]), trained[order])
        for start, stop in ((0, 1), (7, 9), (20, 37), (60, 130), (149, 150)):
            assert torch.equal(model(x[start:stop]), trained[start:stop])
        assert model(x[:0]).shape == (0, 48)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_output_is_the_weighted_sum_of_the_best_experts(normalised: bool):
    model, x = mixture(torch.float32, normalised=normalised), rows(20, torch.float32)
    with torch.no_grad():
        found, chances = model(x), torch.softmax(x.double() @ model.router.weight.double().T, dim=1)
        for row in range(20):
            best = chances[row].argsort(descending=True)[:3].tolist()
            total = sum(chances[row, e] for e in best) if normalised else 1.0
            expected = sum(chances[row, e] / total * model.experts[e](x[row : row + 1])[0].double() for e in best)
            torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_routing_is_ascending_and_float32():
    chosen, weights = mixture(torch.bfloat16).route(rows(30, torch.bfloat16))
    assert (chosen.diff(dim=1) > 0).all() and chosen.unique().numel() > 4
    assert weights.dtype is torch.float32
    torch.testing.assert_close(weights.sum(1), torch.ones(30))


def test_an_expert_nobody_chose_gets_no_gradient_and_the_others_do():
    model = mixture(torch.float32, per_token=1)
    x = rows(2, torch.float32)
    model(x).sum().backward()
    chosen = set(model.route(x)[0].flatten().tolist())
    for number, expert in enumerate(model.experts):
        assert (expert.down.weight.grad is not None) == (number in chosen)


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(ModelError, match="5 of 4 experts"):
        ModelSpec(**SIZES, experts=ExpertSpec(num_experts=4, per_token=5, intermediate_size=8))
