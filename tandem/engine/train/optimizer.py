"""AdamW with float32 masters and gradient sums, whatever type the weights have; moments in float32 or 8 bits.

Owns: the gradient of the step (summed over micro-batches in float32), the clip on its true global norm, the
update, where masters and moments lie, and the optimizer's exact state. Of a sharded model it holds this rank's part;
the norm, and so every decision, is that of all ranks together. Refuses: schedules (the rate is given), publishing.
Invariants: every parameter is updated at every step, with gradient 0 where nothing was computed for it; the
weights are the masters rounded once; a gradient that is not finite changes nothing and raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError, RecordError
from tandem.engine.train import eight_bit

_SQUARES_ROW = 1024  # squares are summed in float32 along such rows, the rows in float64


def global_norm(tensors: Iterable[Tensor], *, sharded: torch.device | None = None) -> Tensor:
    """Euclidean norm over all elements, as a float64 scalar; with ``sharded`` those of all ranks, a collective on that
    device. One float32 sum over tens of millions of squares would be off in the third digit."""
    total: Tensor | None = None
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() - flat.numel() % _SQUARES_ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _SQUARES_ROW), dim=1).double().square().sum()
        rows = rows + flat[whole:].double().square().sum()
        total = rows if total is None else total + rows
    if total is None:
        raise ValueError("no tensors to take the norm of")
    if sharded is not None:
        total = total.to(sharded)
        dist.all_reduce(total)
    return total.sqrt()


class AdamW:
    """The optimizer of one model. Parameters of one dimension (norms, biases) have no weight decay. ``apart``: masters
    are copies on the CPU, whatever the weights are; unset, where the section asks for it and the weights are elsewhere.
    """

    def __init__(self, model: nn.Module, section: OptimizerSection, *, apart: bool | None = None) -> None:
        self._section = section
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if apart is None:
            apart = section.offload and any(p.device.type != "cpu" for p in self._parameters.values())
        self._apart = apart
        self._masters = {name: _master(p, apart=apart) for name, p in self._parameters.items()}
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        self._begun: set[str] = set()  # masters whose gradient holds a part of this step
        self._before_change: list[Callable[[], object]] = []
        groups = [
            {"params": [m for m in self._masters.values() if m.dim() > 1], "weight_decay": section.weight_decay},
            {"params": [m for m in self._masters.values() if m.dim() <= 1], "weight_decay": 0.0},
        ]
        used = [group | {"lr": section.learning_rate} for group in groups if group["params"]]
        betas, epsilon = (section.beta1, section.beta2), section.epsilon
        self._adamw = (
            eight_bit.EightBitAdamW(cast("list[eight_bit.Group]", used), betas=betas, eps=epsilon)
            if section.moments == "8bit"
            else torch.optim.AdamW(used, betas=betas, eps=epsilon, fused=True)
        )

    def before_change(self, call: Callable[[], object]) -> None:
        """Call this once, before what ``weights`` and ``moments`` give changes for the next time."""
        self._before_change.append(call)

    def _announce(self) -> None:
        calls, self._before_change = self._before_change, []
        for call in calls:
            call()

    def accumulate(self) -> None:
        """Add the gradients that a backward pass left on the weights to the sum of this step."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if self._sharded or master is parameter or parameter.grad is None:
                continue  # a float32 weight is its own master, and backward has added already
            if master.grad is None:
                master.grad = torch.empty_like(master)  # kept from step to step: fresh memory is slow memory
            if name in self._begun:
                master.grad.add_(parameter.grad.to(master.device))
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
                master.grad = torch.zeros_like(master) if reduced is None else reduced.to_local().to(master.device)
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
        place = next(iter(self._parameters.values())).device if self._sharded else None
        norm = float(global_norm(gradients, sharded=place))
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
        self._announce()
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.discard()
        self._round()
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights, which somebody else has filled, as masters."""
        for name, parameter in self._parameters.items():
            if self._apart:
                self._masters[name].copy_(parameter.to_local() if isinstance(parameter, DTensor) else parameter)

    def _round(self) -> None:
        """Make the weights the rounded masters, and tell everything that caches weights by version counter."""
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                if self._apart:
                    parameter.to_local().copy_(self._masters[name])
                continue  # else gathered, and rounded, from the masters' own memory
            if self._masters[name] is parameter:
                torch.autograd.graph.increment_version(parameter)  # the fused update does not count itself
            else:
                parameter.copy_(self._masters[name])

    def weights(self) -> dict[str, Tensor]:
        """The float32 masters by parameter name, live; of a sharded model whole copies, by a collective."""
        return dict(self.each_weight())

    def moments(self) -> dict[str, Tensor]:
        """Both moments and the update count by parameter name, as they are kept, whole as ``weights``; empty before the
        first update."""
        return dict(self.each_moment())

    def each_weight(self) -> Iterator[tuple[str, Tensor]]:
        """``weights`` one after the other: who only takes part in the collective need not keep them."""
        for name, master in self._masters.items():
            yield name, self._whole(name, master.detach())

    def each_moment(self) -> Iterator[tuple[str, Tensor]]:
        """``moments`` one after the other."""
        for name, state in self.states().items():
            for part, tensor in state.items():
                yield f"{part}.{name}", self._whole(name, tensor) if part != "step" else tensor.clone()

    def layout(self, name: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Whole shape and type of every part of a parameter's moments."""
        shape = tuple(self._parameters[name].shape)
        if self._section.moments == "8bit":
            return eight_bit.layout(shape)
        return {part: (shape, torch.float32) for part in ("exp_avg", "exp_avg_sq")}

    def states(self) -> dict[str, dict[str, Tensor]]:
        """This rank's part of the moments, and the update counts, by parameter name."""
        return {name: self._adamw.state[m] for name, m in self._masters.items() if m in self._adamw.state}

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """All ranks' parts of something that lies like the parameter, on the CPU; unsharded, the tensor itself."""
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return part
        whole = torch.empty((parameter.shape[0], *part.shape[1:]), dtype=part.dtype, device="meta")
        spread = DTensor.from_local(
            part.to(parameter.to_local().device), parameter.device_mesh, parameter.placements, run_check=False,
            shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip
        return spread.full_tensor().cpu()

    def check(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Whether these are weights of this model, and moments (if there are any) of this optimizer.

        Raises:
            RecordError: names, shapes or types are not those of this model or optimizer.
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
            for part, (shape, dtype) in self.layout(name).items() if moments else ():
                found = moments.get(f"{part}.{name}")
                if found is None or found.shape != torch.Size(shape) or found.dtype is not dtype:
                    raise RecordError(
                        f"the checkpoint keeps the moments of {name} otherwise than optimizer.moments says",
                        hint="resume with the value that the run was started with",
                    )

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Take over exactly what ``weights`` and ``moments`` gave; of a sharded model, this rank's parts of it.

        Raises:
            RecordError: names, shapes or types are not those of this model or optimizer.
        """
        if not self._sharded:
            self.check(weights, moments)
        self._announce()
        for name, master in self._masters.items():
            master.copy_(weights[name])
            self._adamw.state.pop(master, None)
            if moments:
                self._adamw.state[master] = {
                    part: moments[f"{part}.{name}"].to(master.device, copy=True)
                    for part in (*self.layout(name), "step")
                }
        self._round()


def _master(parameter: nn.Parameter, *, apart: bool) -> Tensor:
    """What the optimizer updates: this rank's shard, the float32 weight itself, or a float32 copy of it; ``apart``, a
    copy on the CPU always."""
    if isinstance(parameter, DTensor):
        with torch.no_grad():
            shard = parameter.to_local()
        return shard.float().to("cpu", copy=True) if apart else shard
    if apart:
        return parameter.detach().float().to("cpu", copy=True).requires_grad_()
    return parameter if parameter.dtype is torch.float32 else parameter.detach().float().requires_grad_()
