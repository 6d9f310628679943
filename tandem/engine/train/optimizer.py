"""AdamW with float32 masters, moments and gradient sums, whatever type the weights have.

Owns: the gradient of the step (summed over micro-batches in float32), the clip on its true global norm, the
update, and the optimizer's exact state. Of a sharded model it holds this rank's part; the norm, and so every decision,
is that of all ranks together. Refuses: schedules (the rate is an argument), publishing.
Invariants: every parameter is updated at every step, with gradient 0 where nothing was computed for it; the
weights are the masters rounded once; a gradient that is not finite changes nothing and raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError, RecordError

_SQUARES_ROW = 1024  # squares are summed in float32 along such rows, the rows in float64


def global_norm(tensors: Iterable[Tensor], *, sharded: bool = False) -> Tensor:
    """Euclidean norm over all elements, as a float64 scalar; with ``sharded`` those of all ranks (a collective). One
    float32 sum over tens of millions of squares would be off in the third digit."""
    total: Tensor | None = None
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() - flat.numel() % _SQUARES_ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _SQUARES_ROW), dim=1).double().square().sum()
        rows = rows + flat[whole:].double().square().sum()
        total = rows if total is None else total + rows
    if total is None:
        raise ValueError("no tensors to take the norm of")
    if sharded:
        dist.all_reduce(total)
    return total.sqrt()


class AdamW:
    """The optimizer of one model. Parameters of one dimension (norms, biases) have no weight decay."""

    def __init__(self, model: nn.Module, section: OptimizerSection) -> None:
        self._section = section
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        self._begun: set[str] = set()  # masters whose gradient holds a part of this step
        groups = [
            {"params": [m for m in self._masters.values() if m.dim() > 1], "weight_decay": section.weight_decay},
            {"params": [m for m in self._masters.values() if m.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=section.learning_rate,
            betas=(section.beta1, section.beta2),
            eps=section.epsilon,
            fused=True,
        )

    def accumulate(self) -> None:
        """Add the gradients that a backward pass left on the weights to the sum of this step."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if self._sharded or master is parameter or parameter.grad is None:
                continue  # a float32 weight is its own master, and backward has added already
            if master.grad is None:
                master.grad = torch.empty_like(master)  # kept from step to step: fresh memory is slow memory
            if name in self._begun:
                master.grad.add_(parameter.grad)
            else:
                master.grad.copy_(parameter.grad)
                self._begun.add(name)
            parameter.grad = None

    def discard(self) -> None:
        """Forget the gradients summed so far, those of a step that will not be finished too."""
        self._begun.clear()
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if self._sharded:
                self._masters[name].grad = None

    def _gradients(self) -> list[Tensor]:
        """The summed gradient of every master, 0 where nothing was computed."""
        for name, master in self._masters.items():
            if self._sharded:  # reduced over the ranks into the parameter's shard
                reduced = self._parameters[name].grad
                assert reduced is None or isinstance(reduced, DTensor)
                master.grad = torch.zeros_like(master) if reduced is None else reduced.to_local()
            elif master.grad is None:
                master.grad = torch.zeros_like(master)
            elif master is not self._parameters[name] and name not in self._begun:
                master.grad.zero_()
        return [master.grad for master in self._masters.values() if master.grad is not None]

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clip, update masters and weights, forget the gradients; returns the norm before clipping.

        Raises:
            EngineError: the gradient is not finite; weights and state are as before.
        """
        gradients = self._gradients()
        norm = float(global_norm(gradients, sharded=self._sharded))
        if not math.isfinite(norm):
            names = zip(self._masters, gradients, strict=True)
            broken = next((name for name, gradient in names if not gradient.isfinite().all()), "its sum of squares")
            self.discard()
            raise EngineError(
                f"the gradient is not finite (first in {broken}); the weights were not changed",
                hint="lower optimizer.learning_rate, or check the rewards and log-probabilities of this step",
            )
        if 0 < self._section.max_grad_norm < norm:
            for gradient in gradients:
                gradient.mul_(self._section.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.discard()
        self._round()
        return norm

    def _round(self) -> None:
        """Make the weights the rounded masters, and tell everything that caches weights by version counter."""
        for name, parameter in self._parameters.items():
            if self._sharded:
                continue  # gathered, and rounded, from the masters' own memory
            if self._masters[name] is parameter:
                torch.autograd.graph.increment_version(parameter)  # the fused update does not count itself
            else:
                parameter.copy_(self._masters[name])

    def weights(self) -> dict[str, Tensor]:
        """The float32 masters by parameter name; of a sharded model whole copies, by a collective."""
        return {name: self._whole(name, master.detach()) for name, master in self._masters.items()}

    def moments(self) -> dict[str, Tensor]:
        """Both moments and the update count by parameter name, whole as ``weights``; empty before the first update."""
        return {
            f"{part}.{name}": self._whole(name, state[part]) if part != "step" else state[part]
            for name, state in self.states().items()
            for part in ("exp_avg", "exp_avg_sq", "step")
        }

    def states(self) -> dict[str, dict[str, Tensor]]:
        """This rank's part of the moments, and the update counts, by parameter name."""
        return {name: self._adamw.state[m] for name, m in self._masters.items() if m in self._adamw.state}

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """All ranks' parts of something that lies like the parameter, on the CPU; unsharded, the tensor itself."""
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return part
        spread = DTensor.from_local(
            part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        return spread.full_tensor().cpu()

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Whether these are weights of this model.

        Raises:
            RecordError: names or shapes are not those of this model.
        """
        if weights.keys() != self._masters.keys():
            odd = sorted(weights.keys() ^ self._masters.keys())
            raise RecordError(f"the checkpoint is of another model: {len(odd)} names differ, first {odd[0]}")
        for name, parameter in self._parameters.items():
            if weights[name].shape != parameter.shape:
                raise RecordError(
                    f"the checkpoint is of another model: {name} has shape {tuple(weights[name].shape)}, "
                    f"the model {tuple(parameter.shape)}"
                )

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Take over exactly what ``weights`` and ``moments`` gave; of a sharded model, this rank's parts of it.

        Raises:
            RecordError: names or shapes are not those of this model.
        """
        if not self._sharded:
            self.check(weights)
        for name, master in self._masters.items():
            master.copy_(weights[name])
            self._adamw.state.pop(master, None)
            if moments:
                self._adamw.state[master] = {
                    part: moments[f"{part}.{name}"].clone().to(master.device)
                    for part in ("exp_avg", "exp_avg_sq", "step")
                }
        self._round()


def _master(parameter: nn.Parameter) -> Tensor:
    """What the optimizer updates: this rank's shard, the float32 weight itself, or a float32 copy of it."""
    if isinstance(parameter, DTensor):
        with torch.no_grad():
            return parameter.to_local()
    return parameter if parameter.dtype is torch.float32 else parameter.detach().float().requires_grad_()
