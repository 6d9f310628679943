"""Key lists as trainer and engine make them, and attention in float64 to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.ops import KeyIndex


def packed_keys(lengths: Sequence[int]) -> KeyIndex:
    """Causal sequences packed one after the other, each token attending to its own sequence."""
    slots, starts, counts = [], [], []
    begin = 0
    for length in lengths:
        slots += range(begin, begin + length)
        starts += [begin] * length
        counts += range(1, length + 1)
        begin += length
    return key_index(slots, starts, counts)


def shared_keys(prefix: int, tails: Sequence[int]) -> tuple[KeyIndex, list[list[int]]]:
    """One prefix laid out once, and tails that each attend to it; also each tail's whole path of slots."""
    slots, starts, counts = list(range(prefix)), [0] * prefix, list(range(1, prefix + 1))
    paths, begin = [], prefix
    for tail in tails:
        path = list(range(prefix)) + list(range(begin, begin + tail))
        starts += [len(slots)] * tail
        counts += range(prefix + 1, prefix + tail + 1)
        slots += path
        paths.append(path)
        begin += tail
    return key_index(slots, starts, counts), paths


def key_index(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> KeyIndex:
    return KeyIndex(
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int64),
        torch.tensor(counts, dtype=torch.int32),
    )


def exact_attention(q: Tensor, k: Tensor, v: Tensor, keys: KeyIndex, scale: float, window: int = 0) -> Tensor:
    """Row by row in the inputs' precision promoted to float64; differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[1] // k.shape[1]
    rows = []
    for row in range(q.shape[0]):
        start, count = int(keys.starts_T[row]), int(keys.counts_T[row])
        first = max(0, count - window) if window else 0
        slots = keys.slots_L[start + first : start + count].long()
        k_row = k[slots].repeat_interleave(repeat, 1)
        v_row = v[slots].repeat_interleave(repeat, 1)
        weights = torch.einsum("hd,khd->hk", q[row] * scale, k_row).softmax(1)
        rows.append(torch.einsum("hk,khd->hd", weights, v_row))
    return torch.stack(rows)


def random_qkv(
    num_rows: int, num_slots: int, *, heads: int = 6, groups: int = 2, size: int = 32, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, heads, size, generator=generator)
    k, v = torch.randn(2, num_slots, groups, size, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)
