"""Attention row by row: what every implementation is tested against; on the CPU only, and slow.

Invariant (row-exact): a query row's result depends on its own query, keys and values only. Keys are taken in
chunks of 128 from the row's first key on, rows in blocks of 16 (padded), and chunk sums are added in order, so
that each product has one shape whatever shares the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEY_CHUNK, ROW_BLOCK = 128, 16


def attention_forward(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    slots_L: Tensor,
    starts_T: Tensor,
    counts_T: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Softmax attention of each row over its own key list; accumulates in float32. Returns ``[T, H, D]``."""
    num_rows, num_heads, head_dim = q_THD.shape
    num_groups = k_SGD.shape[1]
    out_THD = torch.empty_like(q_THD)
    for row in range(num_rows):
        count, start = int(counts_T[row]), int(starts_T[row])
        first = max(0, count - window) if window else 0
        slots = slots_L[start + first : start + count].long()
        q = q_THD[row].float().view(num_groups, num_heads // num_groups, head_dim) * scale
        k, v = k_SGD[slots].float(), v_SGD[slots].float()
        chunks = range(0, len(slots), KEY_CHUNK)
        scores = torch.cat([torch.einsum("ghd,kgd->ghk", q, k[c : c + KEY_CHUNK]) for c in chunks], dim=2)
        weights = (scores - scores.amax(2, keepdim=True)).exp()
        total = torch.zeros(num_groups, num_heads // num_groups, 1)
        out = torch.zeros(num_groups, num_heads // num_groups, head_dim)
        for c in chunks:
            part = weights[:, :, c : c + KEY_CHUNK]
            total = total + part.sum(2, keepdim=True)
            out = out + torch.einsum("ghk,kgd->ghd", part, v[c : c + KEY_CHUNK])
        out_THD[row] = (out / total).view(num_heads, head_dim).to(q_THD.dtype)
    return out_THD


def attention_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    slots_L: Tensor,
    starts_T: Tensor,
    counts_T: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k and v, in float32. Slots that several rows list collect from all of them."""
    num_heads, head_dim = q_THD.shape[1:]
    num_groups = k_SGD.shape[1]
    grouped = (num_groups, num_heads // num_groups, head_dim)
    dq_THD = torch.zeros(q_THD.shape, dtype=torch.float32)
    dk_SGD = torch.zeros(k_SGD.shape, dtype=torch.float32)
    dv_SGD = torch.zeros(v_SGD.shape, dtype=torch.float32)
    for row in range(q_THD.shape[0]):
        count, start = int(counts_T[row]), int(starts_T[row])
        first = max(0, count - window) if window else 0
        slots = slots_L[start + first : start + count].long()
        q, grad = q_THD[row].float().view(grouped), grad_THD[row].float().view(grouped)
        k, v = k_SGD[slots].float(), v_SGD[slots].float()
        p = torch.softmax(torch.einsum("ghd,kgd->ghk", q, k) * scale, dim=2)
        dp = torch.einsum("ghd,kgd->ghk", grad, v)
        ds = p * (dp - (p * dp).sum(2, keepdim=True)) * scale
        dq_THD[row] = torch.einsum("ghk,kgd->ghd", ds, k).reshape(num_heads, head_dim)
        dk_SGD.index_add_(0, slots, torch.einsum("ghk,ghd->kgd", ds, q))
        dv_SGD.index_add_(0, slots, torch.einsum("ghk,ghd->kgd", p, grad))
    return dq_THD, dk_SGD, dv_SGD
