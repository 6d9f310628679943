"""Tensors as they are at one moment, to be read later, while training goes on.

Owns: copy on write. A held tensor is the live one until somebody is about to change it; who does so calls ``keep``
first, and what was not read by then is copied to the CPU. Between two updates lie a rollout and all passes of a step,
so most of a checkpoint is written before anything must be copied.
Invariant: what ``reading`` gives has the bits of the moment at which it was held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Held:
    """One tensor. It can be read once; then its memory is let go."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype: torch.dtype = tensor.dtype
        self.shape: torch.Size = tensor.shape
        self._tensor: Tensor | None = tensor.detach()
        self._lives = True
        self._guard = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Tensor]:
        """The tensor; who wants to change it waits until it was read."""
        with self._guard:
            if self._tensor is None:
                raise ValueError("this tensor was read before")
            try:
                yield self._tensor
            finally:
                self._tensor = None

    def keep(self) -> int:
        """Copy it now, unless it was read or copied before; returns the bytes of the copy."""
        with self._guard:
            if self._tensor is None or not self._lives:
                return 0
            self._tensor = self._tensor.to("cpu", copy=True)
            self._lives = False
            return self._tensor.numel() * self._tensor.element_size()


def hold(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Hold named tensors as they are now."""
    return {name: Held(tensor) for name, tensor in tensors.items()}


def keep_all(held: Iterable[Held]) -> int:
    """Copy all that is still to be read; returns the bytes of the copies."""
    return sum(each.keep() for each in held)
