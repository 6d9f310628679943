"""Sums whose order is written down: the same bits on every device, for any number of rows beside.

A library's reduction splits its work by the shape of the whole tensor, so a row's sum may depend on its batch. Here a
row is folded in halves by additions element by element, which have no order to choose.
"""

from __future__ import annotations

import torch
from torch import Tensor


def folded_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, which stays with size 1. Not differentiable: it writes over its own copy."""
    size = x.shape[-1]
    half = 1 << (size.bit_length() - 1)
    if half < size:
        head = x[..., :half].clone()
        head[..., : size - half] += x[..., half:]
        x = head
    while half > 1:
        half //= 2
        x = x[..., :half] + x[..., half:]
    return x


def pyramid(x_TV: Tensor) -> list[Tensor]:
    """Sums of neighbours, of neighbours of those, and so on: from the numbers, filled up with zeros, to ``[T, 1]``."""
    size = x_TV.shape[1]
    levels = [torch.nn.functional.pad(x_TV, (0, (1 << (size - 1).bit_length()) - size))]
    while levels[-1].shape[1] > 1:
        pairs = levels[-1].view(len(x_TV), -1, 2)
        levels.append(pairs[..., 0] + pairs[..., 1])
    return levels
