"""The live weights of a process and the version they are published under.

Owns: the one model that trains and serves, its version number, and its digest. Publishing is an alias: the sampler
reads the very tensors that the optimizer writes; what kernels read in a layout of their own is made in the same job,
all of it or nothing, and compared byte for byte with what was written.
Invariant: weights change only inside one compute job, and that job ends with ``bump``; whoever runs a job of
its own therefore sees weights, what is derived from them, and ``version`` that belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import increment_version

from tandem.core.errors import EngineError
from tandem.core.types import WeightVersion
from tandem.kernels.impl.cpu import whole
from tandem.kernels.impl.cpu.projection import packed_size
from tandem.kernels.moving import sums_of
from tandem.models.causal_lm import CausalLM


class PublishedWeights:
    """A model and the version of its weights. ``version`` rises by one with every change."""

    def __init__(self, model: CausalLM, *, number: int = 0, step: int = 0) -> None:
        self.model = model
        self._current = WeightVersion(number=number, step=step)
        self.is_served_here = True  # else an engine in another process derives what it needs, and checks it
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
        """Name the weights that were just changed; call it in the compute job that changed them.

        Raises:
            EngineError: bytes of a packed copy, of the version before or of this one, are not what was written. The
                version stays the one before.
        """
        return self.set(self._current.number + 1, step)

    def set(self, number: int, step: int) -> WeightVersion:
        """Name weights that came from elsewhere, as a checkpoint's do. Raises as ``bump`` does."""
        digest = self.digest() if self.is_served_here else ""
        self._current = WeightVersion(number=number, step=step, digest=digest)
        self.changes += 1
        return self._current

    def named(self) -> WeightVersion:
        """The current version with its digest, which is taken now if that was not done; call it in a compute job."""
        if not self._current.digest:
            self._current = replace(self._current, digest=self.digest())
        return self._current

    def point_to(self, tensors: Mapping[str, Tensor], version: WeightVersion) -> None:
        """Compute on these tensors, by name, from now on, and name them; call it in a compute job. Nothing is
        copied; copies that operations have prepared of the old ones are made anew. A projection may come as the kernels
        read it (flat): it is served from there. Nothing changes before all of it has been looked at.

        Raises:
            EngineError: the names or shapes are not the model's.
        """
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        if own.keys() != tensors.keys():
            names = ", ".join(sorted(own.keys() ^ tensors.keys())[:3])
            raise EngineError(f"weights {version.number} are not this model's: {names} on one side only")
        packable = self.model.packable()
        held = {name for name in packable if tensors[name].shape == (packed_size(packable[name]),)}
        for name, mine in own.items():
            theirs = tensors[name]
            if mine.dtype is not theirs.dtype or (mine.shape != theirs.shape and name not in held):
                raise EngineError(
                    f"weights {version.number}: {name} is {tuple(theirs.shape)} {theirs.dtype}, the model's is "
                    f"{tuple(mine.shape)} {mine.dtype}"
                )
        quantised = {name: whole.pack(tensors[name]) for name in packable} if self.model.is_quantised else {}
        for name, mine in own.items():
            if name in held:
                self.model.ops.packing.hold(mine, tensors[name])
            else:
                mine.data = tensors[name]
                increment_version([mine])
            if name in quantised:
                self.model.ops.quantised.put(mine, quantised[name])
        self._current = version  # its sender has summed it and its receiver compared
        self.changes += 1

    def digest(self) -> str:
        """SHA-256 over name, type, shape and sum (``kernels.moving``) of every parameter, in order of name. What is
        served here from a packed copy is summed in that form, which is made where there is none of these bytes.

        Raises:
            EngineError: a packed copy is not what was written.
        """
        packing, parameters = self.model.ops.packing, dict(self.model.named_parameters())
        packable = self.model.packable() if self.is_served_here else {}
        sums = packing.renew(packable)
        int8 = self.model.ops.quantised.renew(packable if self.model.is_quantised else {})
        plain = {name: each.detach().cpu().contiguous() for name, each in parameters.items() if name not in sums}
        sums |= dict(zip(plain, sums_of(list(plain.values())), strict=True))
        total = hashlib.sha256()
        for name, sum_8 in sorted(sums.items()):
            form, each = " packed" if name in packable else "", parameters[name]
            total.update(f"{name}{form}\x00{each.dtype}\x00{tuple(each.shape)}\x00".encode() + sum_8.tobytes())
        for name, sum_8 in sorted(int8.items()):
            total.update(f"{name} int8\x00".encode() + sum_8.tobytes())
        return total.hexdigest()

    def verify(self) -> None:
        """Compare all packed copies that there are with what was written.

        Raises:
            EngineError: names the first that has other bytes.
        """
        for packing in (self.model.ops.packing, self.model.ops.quantised):
            packing.check(self.model.packable())
