"""The live weights of a process and the version they are published under.

Owns: the one model that trains and serves, and its version number. Publishing is an alias: the sampler reads the
very tensors that the optimizer writes, so nothing is copied.
Invariant: weights change only inside one compute job, and that job ends with ``bump``; whoever runs a job of
its own therefore sees weights and ``version`` that belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tandem.core.errors import EngineError
from tandem.core.types import WeightVersion
from tandem.models.causal_lm import CausalLM


class PublishedWeights:
    """A model and the version of its weights. ``version`` rises by one with every change."""

    def __init__(self, model: CausalLM, *, number: int = 0, step: int = 0) -> None:
        self.model = model
        self._current = WeightVersion(number=number, step=step)
        self.changes = 0  # how often they were named anew: a number alone may come again from a checkpoint

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
        self.changes += 1
        return self._current

    def point_to(self, tensors: Mapping[str, Tensor], version: WeightVersion) -> None:
        """Compute on these tensors, by name, from now on, and name them; call it in a compute job. Nothing is
        copied; copies that operations have prepared of the old ones are made anew.

        Raises:
            EngineError: the names or shapes are not the model's.
        """
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        if own.keys() != tensors.keys():
            names = ", ".join(sorted(own.keys() ^ tensors.keys())[:3])
            raise EngineError(f"weights {version.number} are not this model's: {names} on one side only")
        for name, mine in own.items():
            if mine.shape != tensors[name].shape or mine.dtype is not tensors[name].dtype:
                theirs = tensors[name]
                raise EngineError(
                    f"weights {version.number}: {name} is {tuple(theirs.shape)} {theirs.dtype}, the model's is "
                    f"{tuple(mine.shape)} {mine.dtype}"
                )
        for name, mine in own.items():
            mine.data = tensors[name]
            increment_version([mine])
        self.set(version.number, version.step)

    def digest(self) -> str:
        """SHA-256 over name, type, shape and bytes of every parameter, in order of name."""
        total = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            total.update(f"{name}\x00{parameter.dtype}\x00{tuple(parameter.shape)}\x00".encode())
            total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return total.hexdigest()
