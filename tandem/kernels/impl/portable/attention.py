"""Attention over key lists, in batched products of one shape.

The keys of a list are taken ``KEYS`` at a time, from its beginning on, with a running maximum and total (Milakov and
Gimelshein 2018, arXiv:1805.02867); the backward pass makes the weights again from the log-sum-exp (Dao et al. 2022,
arXiv:2205.14135). Everything is float32 inside.
Invariant (row-exact): a row's bits depend on its own query, keys and values. Products have one shape (``tiles``), sums
over keys are folded, and keys that a row does not see add exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.kernels.impl.portable.sums import folded_sum
from tandem.kernels.impl.portable.tiles import Batch, Tiles

KEYS = 128


def attention_forward(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, slots_L: Tensor, tiles: Tiles, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, D]`` and the log-sum-exp ``[T, H]``."""
    groups = k_SGD.shape[1]
    outs, sums = [], []
    for batch in tiles.batches():
        q = _grouped(q_THD[batch.rows_BR].float() * scale, groups)
        top = q.new_full((*q.shape[:3], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for slots_BC, hidden in _chunks(batch, slots_L, window, q.shape[2]):
            k, v = (_gathered(each, slots_BC) for each in (k_SGD, v_SGD))
            scores = (q @ k.transpose(2, 3)).masked_fill_(hidden, -torch.inf)
            higher = torch.maximum(top, scores.amax(3, keepdim=True))
            calm = higher.masked_fill(higher == -torch.inf, 0.0)  # a row that has seen no key yet
            weights, kept = (scores - calm).exp_(), (top - calm).exp_()
            total = total * kept + folded_sum(weights)
            out = out * kept + weights @ v
            top = higher
        outs.append(_ungrouped(out / total, q_THD.shape[1]))
        sums.append(_ungrouped(top + total.log(), q_THD.shape[1])[..., 0])
    out_THD = torch.cat(outs)[tiles.places_T].to(q_THD.dtype)
    return out_THD, torch.cat(sums)[tiles.places_T]


def attention_backward(
    grad_THD: Tensor, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, out_THD: Tensor, lse_TH: Tensor, slots_L: Tensor,
    tiles: Tiles, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v in float32. Slots that several rows list collect from all of them."""
    groups, heads = k_SGD.shape[1], q_THD.shape[1]
    dk_SGD, dv_SGD = (torch.zeros_like(each, dtype=torch.float32) for each in (k_SGD, v_SGD))
    delta_TH = (grad_THD.float() * out_THD.float()).sum(2)
    dqs = []
    for batch in tiles.batches():
        rows_BR, valid = batch.rows_BR, batch.valid_BR[..., None, None].bool()
        q = _grouped(q_THD[rows_BR].float() * scale, groups)
        grad = _grouped(grad_THD[rows_BR].float().masked_fill(~valid, 0.0), groups)
        lse = _grouped(lse_TH[rows_BR][..., None], groups)
        delta = _grouped(delta_TH[rows_BR][..., None].masked_fill(~valid, 0.0), groups)
        dq = torch.zeros_like(q)
        for slots_BC, hidden in _chunks(batch, slots_L, window, q.shape[2]):
            k, v = (_gathered(each, slots_BC) for each in (k_SGD, v_SGD))
            weights = ((q @ k.transpose(2, 3)).masked_fill_(hidden, -torch.inf) - lse).exp_()
            dscores = weights * (grad @ v.transpose(2, 3) - delta)
            dq += dscores @ k
            # Accumulating index_put has one order of sums on every device; index_add has none on an accelerator.
            place = (slots_BC.reshape(-1),)
            dk_SGD.index_put_(place, _scattered(dscores.transpose(2, 3) @ q), accumulate=True)
            dv_SGD.index_put_(place, _scattered(weights.transpose(2, 3) @ grad), accumulate=True)
        dqs.append(_ungrouped(dq * scale, heads))
    return torch.cat(dqs)[tiles.places_T], dk_SGD, dv_SGD


def _chunks(batch: Batch, slots_L: Tensor, window: int, queries: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots ``[B, KEYS]`` of each chunk that one of the batch's rows sees a key of, and which keys each of the
    ``queries`` of a group does not see, ``[B, 1, queries, KEYS]``."""
    first = max(0, batch.least - window) // KEYS * KEYS if window else 0
    counts_BR1 = batch.counts_BR[..., None]
    longest_B1 = batch.counts_BR.amax(1, keepdim=True)
    for begin in range(first, batch.most, KEYS):
        numbers_C = torch.arange(begin, begin + KEYS, device=slots_L.device)
        # What lies behind a list may be anything: its own last key stands in, and is hidden.
        listed_BC = torch.minimum(numbers_C, longest_B1 - 1) + batch.starts_B[:, None]
        hidden_BRC = numbers_C >= counts_BR1
        if window:
            hidden_BRC |= numbers_C < counts_BR1 - window
        yield slots_L[listed_BC].long(), hidden_BRC.repeat_interleave(queries // hidden_BRC.shape[1], 1)[:, None]


def _grouped(x_BRHD: Tensor, groups: int) -> Tensor:
    """``[B, R, H, D]`` to ``[B, G, R x H / G, D]``."""
    tiles, rows, heads, size = x_BRHD.shape
    split = x_BRHD.view(tiles, rows, groups, heads // groups, size).transpose(1, 2)
    return split.reshape(tiles, groups, rows * (heads // groups), size)


def _ungrouped(x_BGQD: Tensor, heads: int) -> Tensor:
    """The way back, to ``[B x R, H, D]``."""
    tiles, groups, queries, size = x_BGQD.shape
    split = x_BGQD.view(tiles, groups, queries * groups // heads, heads // groups, size).transpose(1, 2)
    return split.reshape(-1, heads, size)


def _gathered(x_SGD: Tensor, slots_BC: Tensor) -> Tensor:
    """Float32 ``[B, G, C, D]``."""
    return x_SGD[slots_BC].float().transpose(1, 2).contiguous()


def _scattered(x_BGCD: Tensor) -> Tensor:
    """``[B x C, G, D]``."""
    return x_BGCD.transpose(1, 2).flatten(0, 1)
