"""A model cut over the ranks of a group: FSDP2 on one mesh axis.

Owns: sharding, and the way of whole tensors into shards and back. Every parameter is cut along its first dimension;
trained ones are float32 (the masters) and are gathered in the model's type, layer by layer, frozen ones keep their
type (Zhao et al. 2023, arXiv:2304.11277; ``torch.distributed.fsdp.fully_shard``).
Invariants: gradients are summed over ranks in float32, never averaged: the normaliser is already that of the whole
step; what is gathered has the bits that one process would have, the masters rounded once.
The mesh has one axis, ``data``; tensor, context and expert axes would stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tandem.algorithms.spec import AlgorithmSpec
from tandem.config.sections.engine import TrainSection
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError
from tandem.core.types import Floats, Sample, Trajectory
from tandem.engine.train.learner import Learner, Normaliser
from tandem.engine.train.optimizer import AdamW
from tandem.engine.train.score import score_batch
from tandem.kernels.ops import Ops
from tandem.models.causal_lm import CausalLM
from tandem.models.lora import LoraSpec, add_adapters
from tandem.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every rank builds the same from."""

    spec: ModelSpec
    lora: LoraSpec | None
    dtype: torch.dtype
    numerics: str
    train: TrainSection
    optimizer: OptimizerSection
    algorithm: AlgorithmSpec


class Shard:
    """One rank's shard of the model, its learner and its optimizer; ``fill`` gives it weights. Unless it says so, a
    method is a collective: all ranks call it, in the same order. ``target``, ``weights`` and so on are rank 0's."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        model = CausalLM(setup.spec, Ops(setup.numerics, device), dtype=setup.dtype, device=device)
        if setup.lora is not None:
            add_adapters(model, setup.lora, seed=0)
        cut(model, device)
        self.model = model
        self.optimizer = AdamW(model, setup.optimizer)
        self._learner = Learner(model, train=setup.train, algorithm=setup.algorithm)
        self._train = setup.train
        self._dtype = setup.dtype

    def fill(self, whole: Mapping[str, Tensor] | None) -> None:
        """Take the slices of the weights that rank 0 has."""
        with torch.no_grad():
            for name, parameter in _named(self.model).items():
                tensor = self._broadcast(whole[name] if whole is not None else None, parameter.shape, self._dtype)
                parameter.to_local().copy_(slice_of(tensor, parameter))
        self.optimizer.refresh()
        self._changed()

    def learn(self, row: Sequence[Sample], step: Normaliser) -> Tensor | None:
        """One row forward and backward, into the sum of the step; without samples a pass that adds nothing."""
        if row:
            return self._learner.micro_batch(row, step)
        self._learner.idle()
        return None

    def update(self, rate: float) -> float:
        """Clip and update; returns the norm of all ranks' gradient.

        Raises:
            EngineError: the gradient is not finite, on every rank alike; nothing has changed.
        """
        norm = self.optimizer.step(rate)
        self._changed()
        return norm

    @torch.no_grad()
    def publish(self, target: nn.Module | None) -> None:
        """Gather the trained weights, rounded, and write them into ``target``."""
        places = dict(target.named_parameters()) if target is not None else {}
        for name, parameter in _named(self.model).items():
            if parameter.requires_grad:
                whole = parameter.detach().to(self._dtype)
                assert isinstance(whole, DTensor)
                gathered = whole.full_tensor()
                if target is not None:
                    places[name].copy_(gathered)

    @torch.no_grad()
    def score(self, batch: Sequence[Trajectory]) -> list[Floats]:
        """Log-probabilities of the trajectories of one pass; without any, a pass that gives nothing."""
        if batch:
            return score_batch(self.model, batch, self._train)
        self._learner.idle()
        return []

    def restore(
        self, weights: Mapping[str, Tensor] | None, moments: Mapping[str, Tensor] | None, *, with_moments: bool
    ) -> None:
        """Take this rank's slices of whole masters and moments."""
        given = weights or {}
        kept, states = moments or {}, {}
        masters = {}
        for name, parameter in _named(self.model).items():
            if not parameter.requires_grad:
                continue
            masters[name] = self._part(given.get(name), parameter, parameter.shape, torch.float32)
            if with_moments:
                for part, (shape, dtype) in self.optimizer.layout(name).items():
                    key = f"{part}.{name}"
                    states[key] = self._part(kept.get(key), parameter, torch.Size(shape), dtype)
                key = f"step.{name}"
                states[key] = self._broadcast(kept.get(key), torch.Size(()), torch.float32)
        self.optimizer.restore(masters, states)
        self._changed()

    def _part(self, whole: Tensor | None, parameter: DTensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return slice_of(self._broadcast(whole, shape, dtype), parameter).clone()

    def _broadcast(self, given: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Rank 0's tensor on every rank; the others give None."""
        if given is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.model.device)
        else:
            tensor = given.detach().to(device=self.model.device, dtype=dtype).contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    def settle(self) -> None:
        """Let go of what the passes have gathered; no collective."""
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()

    def _changed(self) -> None:
        """The weights were written: what was gathered or packed from them before is old."""
        self.settle()
        self.model.ops.forget_packed()  # what is gathered comes past the version counters


def cut(model: CausalLM, device: torch.device) -> None:
    """Shard a model over the ranks of the default process group, each layer a unit of its own.

    A layer is gathered for its own forward and backward pass only; embedding, last norm and head stay from the one to
    the other.

    Raises:
        EngineError: this PyTorch cannot shard layers that not every rank uses.
    """
    dtype = model.dtype
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    spread_unused = getattr(model, "set_reduce_scatter_unused_params", None)
    if spread_unused is None:
        raise EngineError(
            f"PyTorch {torch.__version__} cannot train on several devices here", hint="install PyTorch 2.13 or newer"
        )
    spread_unused(True)  # an expert that nobody chose on this rank, the head of a rank without samples


def slice_of(whole: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part of a whole tensor, cut as ``parameter`` is."""
    mesh = parameter.device_mesh
    parts = torch.chunk(whole, mesh.size(), dim=0)
    return parts[mesh.get_local_rank()] if mesh.get_local_rank() < len(parts) else whole[:0]


def _named(model: nn.Module) -> dict[str, DTensor]:
    found: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is gathered: reshard first"
        found[name] = parameter
    return found
