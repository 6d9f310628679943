"""AdamW whose moments take one byte a number, in blocks that each have their own scale.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861 (blocks, dynamic map), with
the second moment's map without a zero: Li et al. 2023, Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507
(a second moment rounded to 0 would divide by epsilon). Moments are float32 while they are used, and rounded after.
Owns: the maps, rounding, the update. Refuses: schedules, clipping. Invariants: a block never reaches over a row, so a
shard of whole rows has the same bytes as its part of the whole; what was rounded once is rounded to itself. Parameters
of one dimension keep float32 moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TypedDict

import torch
from torch import Tensor

BLOCK = 256
_CHUNK = 1 << 20  # numbers that are float32 at a time
_DECADES = 7


class Group(TypedDict):
    """Parameters that share their options, as in ``torch.optim``."""

    params: list[Tensor]
    lr: float
    weight_decay: float


def dynamic_map(*, signed: bool) -> Tensor:
    """The values of the codes, rising, the largest 1: in each decade below twice as few as in the one above. The signed
    one has 0 and is symmetric; the other one has no 0. ``[255]`` or ``[254]``."""
    values: list[float] = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        values += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
    largest = max(values)
    positive = sorted(value / largest for value in values)
    return torch.tensor([-v for v in reversed(positive)] + [0.0] + positive if signed else positive).float()


@cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of the codes, and the nearest code of every bfloat16, by its bits. The steps of the map are wider than
    twice the rounding to bfloat16."""
    values = dynamic_map(signed=signed)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    nearest = torch.bucketize(every.nan_to_num(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return values.to(device), nearest.to(device)


def quantise(values_RC: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes ``[R, C]`` and scales ``[R, blocks]`` of rows of float32 numbers."""
    rows, columns = values_RC.shape
    _, nearest = _tables(signed, values_RC.device)
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(values_RC, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales_RB = padded.abs().amax(dim=2)
    shares = padded / scales_RB.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    codes = nearest[shares.bfloat16().view(torch.int16).int() & 0xFFFF]
    return codes.view(rows, blocks * BLOCK)[:, :columns].contiguous(), scales_RB


def restored(codes_RC: Tensor, scales_RB: Tensor, *, signed: bool) -> Tensor:
    """The float32 numbers of codes."""
    values, _ = _tables(signed, codes_RC.device)
    return values[codes_RC.int()] * scales_RB.repeat_interleave(BLOCK, dim=1)[:, : codes_RC.shape[1]]


def layout(shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every part of a parameter's state but the count of updates."""
    if len(shape) < 2:
        return {part: (tuple(shape), torch.float32) for part in ("exp_avg", "exp_avg_sq")}
    scales = (shape[0], -(-math.prod(shape[1:]) // BLOCK))
    return {
        "exp_avg": (tuple(shape), torch.uint8),
        "exp_avg_scale": (scales, torch.float32),
        "exp_avg_sq": (tuple(shape), torch.uint8),
        "exp_avg_sq_scale": (scales, torch.float32),
    }


class EightBitAdamW:
    """What ``torch.optim.AdamW`` is to its caller: ``param_groups``, ``state``, ``step``."""

    def __init__(self, groups: Sequence[Group], *, betas: tuple[float, float], eps: float) -> None:
        self.param_groups = list(groups)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._betas = betas
        self._epsilon = eps

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state.setdefault(parameter, {})
        if not state:
            state["step"] = torch.zeros(())
            for part, (shape, dtype) in layout(parameter.shape).items():
                state[part] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        state["step"] += 1
        count = float(state["step"])
        if parameter.dim() < 2:
            self._apply(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], count, rate, decay)
            return
        rows = parameter.shape[0]
        parts = {name: part.view(rows, -1) for name, part in state.items() if name != "step"}
        weights_RC, gradients_RC = parameter.view(rows, -1), gradient.reshape(rows, -1)
        most = max(1, _CHUNK // max(1, weights_RC.shape[1]))
        for begin in range(0, rows, most):
            cut = slice(begin, begin + most)
            first = restored(parts["exp_avg"][cut], parts["exp_avg_scale"][cut], signed=True)
            second = restored(parts["exp_avg_sq"][cut], parts["exp_avg_sq_scale"][cut], signed=False)
            self._apply(weights_RC[cut], gradients_RC[cut], first, second, count, rate, decay)
            for part, signed, moment in (("exp_avg", True, first), ("exp_avg_sq", False, second)):
                codes, scales = quantise(moment, signed=signed)
                parts[part][cut].copy_(codes)
                parts[f"{part}_scale"][cut].copy_(scales)

    def _apply(
        self, weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: float, rate: float, decay: float
    ) -> None:
        """One update in float32, as in ``torch.optim.AdamW``; both moments are changed in place."""
        beta1, beta2 = self._betas
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**count)).sqrt_().add_(self._epsilon)
        weights.mul_(1 - rate * decay).addcdiv_(first, root, value=-rate / (1 - beta1**count))
