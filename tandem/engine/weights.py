"""The live weights of a process and the version they are published under.

Owns: the one model that trains and serves, and its version number. Publishing is an alias: the sampler reads the
very tensors that the optimizer writes, so nothing is copied.
Invariant: weights change only inside one compute job, and that job ends with ``bump``; whoever runs a job of
its own therefore sees weights and ``version`` that belong together.
"""

from __future__ import annotations

import hashlib

import torch

from tandem.core.types import WeightVersion
from tandem.models.causal_lm import CausalLM


class PublishedWeights:
    """A model and the version of its weights. ``version`` rises by one with every change."""

    def __init__(self, model: CausalLM, *, number: int = 0, step: int = 0) -> None:
        self.model = model
        self._current = WeightVersion(number=number, step=step)

    @property
    def version(self) -> int:
        """Number of the weights as they are now."""
        return self._current.number

    @property
    def current(self) -> WeightVersion:
        """The record that goes to inference and scheduler."""
        return self._current

    def bump(self, step: int) -> WeightVersion:
        """Name the weights that were just changed; call it in the compute job that changed them."""
        return self.set(self._current.number + 1, step)

    def set(self, number: int, step: int) -> WeightVersion:
        """Name weights that came from elsewhere, as a checkpoint's do."""
        self._current = WeightVersion(number=number, step=step)
        return self._current

    def digest(self) -> str:
        """SHA-256 over name, type, shape and bytes of every parameter, in order of name."""
        total = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            total.update(f"{name}\x00{parameter.dtype}\x00{tuple(parameter.shape)}\x00".encode())
            total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return total.hexdigest()
