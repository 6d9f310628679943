"""The check at the start, with a small model of the family: it holds here, and sees what the operations alone do not
show."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from tandem.kernels.ops import Ops
from tandem.models import proof
from tandem.models.experts import Mixture
from tandem.models.spec import ExpertSpec, ModelSpec, RopeSpec

LLAMA = ModelSpec(
    family="llama", vocab_size=5000, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, max_positions=8192, tied_head=True,
)  # fmt: skip
SPECS = {
    "llama": LLAMA,
    "gemma3": replace(
        LLAMA, family="gemma3_text", windows=(512,) * 29 + (0,), local_rope=RopeSpec(theta=500.0), qk_norm=True,
        activation="gelu_tanh", unit_offset_norms=True, post_norms=True, scaled_embedding=True, query_scalar=256,
    ),
    "qwen3_moe": replace(
        LLAMA, family="qwen3_moe", tied_head=False, qk_norm=True,
        experts=ExpertSpec(num_experts=128, per_token=8, intermediate_size=768, normalised=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_sampler_and_trainer_have_the_same_bits_here(name, dtype, portable):
    assert proof.gaps(proof.small(SPECS[name]), dtype, Ops("exact", "cpu", portable=portable)) == []


def test_the_small_model_has_the_traits_of_the_large_one():
    gemma, mixture = proof.small(SPECS["gemma3"]), proof.small(SPECS["qwen3_moe"])
    assert gemma.windows == (proof.WINDOW, 0) and gemma.post_norms and gemma.local_rope == RopeSpec(theta=500.0)
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (6, 2, 64)
    assert mixture.experts and (mixture.experts.num_experts, mixture.experts.per_token) == (5, 2)
    uses = proof.uses_of(SPECS["qwen3_moe"], torch.device("cuda"))
    assert uses.routed and (576, 960) in uses.shapes and (576, 5000) in uses.shapes and (768, 576) in uses.shapes
    assert proof.uses_of(SPECS["gemma3"], torch.device("cpu")).shapes == ()


def test_experts_that_look_at_their_batch_are_found(monkeypatch):
    right = Mixture.route

    def crowded(self, x_TE, routes=None):
        chosen, weights = right(self, x_TE, routes)
        return chosen, weights * (1 + 1e-3 * (len(x_TE) == 1))

    monkeypatch.setattr(Mixture, "route", crowded)
    found = proof.gaps(proof.small(SPECS["qwen3_moe"]), torch.float32, Ops("exact", "cpu"))
    assert found and found[0].startswith("the qwen3_moe model's token")


class Rounded(Ops):
    """Operations that add in another order for few rows, as libraries do."""

    def linear(self, x_TK, weight_NK, bias_N=None):
        out = super().linear(x_TK, weight_NK, bias_N)
        return out * 1.01 if x_TK.shape[0] == 7 else out


def test_where_exactness_does_not_hold_it_is_said_and_fast_is_used(monkeypatch, caplog):
    assert proof.proven("exact", torch.float32, "cpu", LLAMA) == "exact"
    monkeypatch.setattr(proof, "Ops", Rounded)
    with caplog.at_level(logging.WARNING):
        assert proof.proven("exact", torch.float32, "cpu", LLAMA) == "fast"
    assert "do not hold" in caplog.text and "of 7 rows" in caplog.text
    caplog.clear()
    assert proof.proven("fast", torch.float32, "cpu", LLAMA) == "fast"
    assert not caplog.text
