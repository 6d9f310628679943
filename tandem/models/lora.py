"""Low-rank adapters on the projections of a model, in and out of PEFT's format.

Owns: LoRA (Hu et al. 2021, arXiv:2106.09685: y = W x + alpha / r B A x, A random, B zero) and DoRA (Liu et al. 2024,
arXiv:2402.09353, equation 5: rows of W + alpha / r B A brought to a learned length; the norm is a constant to the
gradient, section 4.3). Our projections are fused, files keep them apart: each part has its own A and B.
Invariants: base weights are never changed, so taking adapters off is exact; merging makes a copy, summed in float32
and rounded once; with fresh adapters a model computes what it did.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tandem.core.errors import ModelError, boundary
from tandem.core.wire import derive_seed
from tandem.models.causal_lm import CausalLM
from tandem.models.family import Piece, find_family
from tandem.models.layers import Linear

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = {"attention": (".attention.",), "mlp": (".mlp.",), "all": (".attention.", ".mlp.")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """What kind of adapters a model has."""

    rank: int
    alpha: float
    targets: str = "all"
    dora: bool = False


class Adapter(nn.Module):
    """The update of one fused projection. ``parts`` are the row ranges of the projections that files keep apart."""

    def __init__(self, linear: Linear, parts: list[tuple[int, int]], spec: LoraSpec) -> None:
        super().__init__()
        weight = linear.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        self.rank, self.scale, self.parts = spec.rank, spec.alpha / spec.rank, parts
        self.ops = linear.ops
        self.a = nn.Parameter(torch.zeros(len(parts) * spec.rank, weight.shape[1], **like))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], spec.rank, **like))
        self.magnitude = nn.Parameter(weight.detach().float().norm(dim=1).to(weight.dtype)) if spec.dora else None

    def forward(self, x_TK: Tensor, weight_NK: Tensor, plain_TN: Tensor) -> Tensor:
        """The projection with its update; ``plain_TN`` is that of the base weight, without bias."""
        inner_TR = self.ops.linear(x_TK, self.a)
        pieces = [
            self.ops.linear(inner_TR[:, number * self.rank : (number + 1) * self.rank].contiguous(), self.b[start:stop])
            for number, (start, stop) in enumerate(self.parts)
        ]
        out_TN = plain_TN + self.scale * torch.cat(pieces, dim=1)
        if self.magnitude is None:
            return out_TN
        with torch.no_grad():
            lengths_N = (weight_NK.float() + self.delta()).norm(dim=1)
        return out_TN * (self.magnitude.float() / lengths_N).to(out_TN.dtype)

    def delta(self) -> Tensor:
        """alpha / r B A of all parts, float32 ``[out, in]``."""
        rows = [
            self.b[start:stop].float() @ self.a[number * self.rank : (number + 1) * self.rank].float()
            for number, (start, stop) in enumerate(self.parts)
        ]
        return self.scale * torch.cat(rows)

    @torch.no_grad()
    def merged(self, weight_NK: Tensor) -> Tensor:
        """The weight with its update, summed in float32 and rounded once."""
        whole_NK = weight_NK.float() + self.delta()
        if self.magnitude is not None:
            whole_NK *= (self.magnitude.float() / whole_NK.norm(dim=1))[:, None]
        return whole_NK.to(weight_NK.dtype)


def add_adapters(model: CausalLM, spec: LoraSpec, *, seed: int) -> CausalLM:
    """Freeze the model and put fresh adapters on it; each draws from its own seed and name."""
    model.requires_grad_(False)
    for name, pieces in _pieces(model, spec.targets).items():
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear)
        adapter = Adapter(linear, [(piece.start, piece.stop) for piece in pieces], spec)
        with torch.no_grad():  # as PEFT draws it: uniform, bound 1 / sqrt(inputs)
            generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
            draw = torch.rand(adapter.a.shape, generator=generator) * 2 - 1
            adapter.a.copy_(draw / math.sqrt(adapter.a.shape[1]))
        linear.adapter = adapter
    return model


def adapters_of(model: CausalLM) -> dict[str, Adapter]:
    """The adapters of a model by the name of their projection."""
    return {
        name: module.adapter
        for name, module in model.named_modules()
        if isinstance(module, Linear) and isinstance(module.adapter, Adapter)
    }


def merged_copy(model: CausalLM) -> CausalLM:
    """The model as one without adapters; the given one stays as it is."""
    twin = copy.deepcopy(model, {id(model.ops): model.ops})
    for module in twin.modules():
        if isinstance(module, Linear) and isinstance(module.adapter, Adapter):
            with torch.no_grad():
                module.weight.copy_(module.adapter.merged(module.weight))
            module.adapter = None
    return twin


def save_adapters(model: CausalLM, folder: Path, *, base: str) -> None:
    """Write the adapters as PEFT reads them; ``base`` is what they belong to."""
    adapters = adapters_of(model)
    if not adapters:
        raise ModelError("the model has no adapters to save", hint="train with lora.rank above 0")
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    for name, pieces in _pieces(model, "all").items():
        if name not in adapters:
            continue
        adapter = adapters[name]
        for number, piece in enumerate(pieces):
            source = piece.source.removesuffix(".weight")
            modules.add(source.rsplit(".", 1)[-1])
            for end, tensor in _views(adapter, number).items():
                tensors[f"base_model.model.{source}.{end}"] = tensor.detach().cpu().contiguous()
    one = next(iter(adapters.values()))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": one.rank,
        "lora_alpha": one.scale * one.rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "target_modules": sorted(modules), "use_dora": one.magnitude is not None,
        "use_rslora": False,
    }  # fmt: skip
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter_spec(folder: Path) -> LoraSpec:
    """What kind of adapters a PEFT folder holds.

    Raises:
        ModelError: it is none, or of a kind that is not known here.
    """
    with boundary(ModelError, f"{folder} holds no PEFT adapter"):
        config = json.loads((folder / CONFIG).read_text())
    for key in ("use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise ModelError(f"{folder / CONFIG}: {key} is not supported")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise ModelError(f"{folder / CONFIG}: only LoRA without biases is supported")
    modules = set(config["target_modules"])
    attention, mlp = modules & {"q_proj", "k_proj", "v_proj", "o_proj"}, modules & {"gate_proj", "up_proj", "down_proj"}
    targets = "all" if attention and mlp else "attention" if attention else "mlp"
    return LoraSpec(
        rank=config["r"], alpha=config["lora_alpha"], targets=targets, dora=bool(config.get("use_dora", False))
    )


@torch.no_grad()
def load_adapters(model: CausalLM, folder: Path) -> CausalLM:
    """Put the adapters of a PEFT folder on a model. A projection that the folder leaves out keeps a zero update.

    Raises:
        ModelError: a tensor has no place in the model, or another shape.
    """
    spec = read_adapter_spec(folder)
    add_adapters(model, spec, seed=0)
    with boundary(ModelError, f"{folder / TENSORS} is broken"):
        tensors = load_file(folder / TENSORS)
    for name, pieces in _pieces(model, spec.targets).items():
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear) and isinstance(linear.adapter, Adapter)
        for number, piece in enumerate(pieces):
            for end, place in _views(linear.adapter, number).items():
                key = f"base_model.model.{piece.source.removesuffix('.weight')}.{end}"
                if key not in tensors:
                    continue
                tensor = tensors.pop(key)
                if tensor.shape != place.shape:
                    raise ModelError(f"{key} has shape {tuple(tensor.shape)}, the model's is {tuple(place.shape)}")
                place.copy_(tensor)
    if tensors:
        raise ModelError(f"{folder}: the model has no place for {next(iter(tensors))} ({len(tensors)} such tensors)")
    return model


def _views(adapter: Adapter, number: int) -> dict[str, Tensor]:
    """The tensors of one part under the ends of their PEFT names."""
    start, stop = adapter.parts[number]
    views: dict[str, Tensor] = {
        "lora_A.weight": adapter.a[number * adapter.rank : (number + 1) * adapter.rank],
        "lora_B.weight": adapter.b[start:stop],
    }
    if adapter.magnitude is not None:
        views["lora_magnitude_vector"] = adapter.magnitude[start:stop]
    return views


def _pieces(model: CausalLM, targets: str) -> dict[str, list[Piece]]:
    """The pieces of every projection that may have an adapter, by the projection's name."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in find_family(model.spec.family, where="model").pieces(model.spec):
        name, _, kind = piece.parameter.rpartition(".")
        targeted = any(part in name for part in TARGETS[targets]) and not name.endswith(("norm", ".router"))
        if kind == "weight" and targeted:
            found[name].append(piece)
    return found
