"""Attention in tiles of one shape: right beyond one chunk of keys, and blind to what lies behind a list."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.impl import reference
from tandem.kernels.impl.portable import attention
from tandem.kernels.keys import KeyIndex
from tests.kernels.attention_cases import exact_attention, key_index, packed_keys, random_qkv, shared_keys


def forward(q, k, v, keys: KeyIndex, window: int = 0):
    return attention.attention_forward(q, k, v, keys.slots_L, keys.tiles(), 0.2, window)


@pytest.mark.parametrize("window", [0, 9, 200])
def test_it_is_the_reference_over_several_chunks_of_keys(window: int) -> None:
    q, k, v = random_qkv(300, 300)
    keys = packed_keys([300])
    out, lse = forward(q, k, v, keys, window)
    right = reference.attention_forward(q, k, v, keys.slots_L, keys.starts_T, keys.counts_T, 0.2, window)
    torch.testing.assert_close(out, right, atol=2e-5, rtol=2e-5)
    if not window:
        scores = torch.einsum("hd,khd->hk", q[299], k.repeat_interleave(3, 1)) * 0.2
        torch.testing.assert_close(lse[299], scores.logsumexp(1))


def test_decode_rows_of_uneven_lengths_each_see_their_own_list() -> None:
    counts = [1, 290, 17, 128, 129, 64, 3, 250]
    q, k, v = random_qkv(len(counts), 1000)
    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()
    starts = [sum(counts[:number]) for number in range(len(counts))]
    keys = key_index(slots, starts, counts)
    torch.testing.assert_close(
        forward(q, k, v, keys)[0].double(), exact_attention(q, k, v, keys, 0.2), atol=2e-5, rtol=2e-5
    )


def test_what_lies_behind_a_list_and_in_unread_slots_does_not_matter() -> None:
    q, k, v = random_qkv(40, 60)
    keys = key_index([*range(40), *[55] * 30], [0] * 40, range(1, 41))
    right = forward(q, k, v, keys)[0]
    k[40:], v[40:] = torch.nan, torch.nan
    assert torch.equal(forward(q, k, v, keys)[0], right)
    assert torch.equal(forward(q[39:], k, v, key_index([*range(40), *[55] * 30], [0], [40]))[0], right[39:])


@pytest.mark.parametrize("window", [0, 5, 150])
@pytest.mark.parametrize("prefix", [11, 190])
def test_gradients_are_right_with_a_shared_beginning(prefix: int, window: int) -> None:
    keys, _ = shared_keys(prefix, [4, 1, 27])
    q, k, v = (t.requires_grad_() for t in random_qkv(prefix + 32, prefix + 32))
    wanted = exact_attention(q, k, v, keys, 0.2, window)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(wanted, (q, k, v), grad.double())
    out, lse = forward(q.detach(), k.detach(), v.detach(), keys, window)
    found = attention.attention_backward(
        grad, q.detach(), k.detach(), v.detach(), out, lse, keys.slots_L, keys.tiles(), 0.2, window
    )
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=3e-5, rtol=2e-4)
