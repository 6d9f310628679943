"""Attention without a compiler: the same contract as the kernels."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.impl import reference
from tandem.kernels.ops import KeyIndex
from tests.kernels.attention_cases import exact_attention, key_index, packed_keys, random_qkv, shared_keys


def index(keys: KeyIndex) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return keys.slots_L, keys.starts_T, keys.counts_T


@pytest.mark.parametrize("window", [0, 9])
def test_forward_is_right_beyond_one_chunk_of_keys(window):
    q, k, v = random_qkv(300, 300)
    keys = packed_keys([300])
    out = reference.attention_forward(q, k, v, *index(keys), 0.2, window)
    torch.testing.assert_close(out.double(), exact_attention(q, k, v, keys, 0.2, window), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_has_the_same_bits(dtype):
    q, k, v = random_qkv(140, 140, dtype=dtype)
    whole = reference.attention_forward(q, k, v, *index(packed_keys([140])), 0.2, 0)
    for row in (0, 1, 127, 128, 139):
        alone = key_index(range(140), [0], [row + 1])
        assert torch.equal(reference.attention_forward(q[row : row + 1], k, v, *index(alone), 0.2, 0)[0], whole[row])


@pytest.mark.parametrize("window", [0, 5])
def test_gradients_are_right(window):
    q, k, v = (t.requires_grad_() for t in random_qkv(23, 23))
    keys, _ = shared_keys(11, [4, 1, 7])
    expected_out = exact_attention(q, k, v, keys, 0.2, window)
    grad = torch.randn(expected_out.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(expected_out, (q, k, v), grad.double())
    found = reference.attention_backward(grad, q.detach(), k.detach(), v.detach(), *index(keys), 0.2, window)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=2e-4)
