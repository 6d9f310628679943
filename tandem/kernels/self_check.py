"""Whether a row really has the same bits in every batch on this machine: libraries promise no such thing.

Owns: the operations one by one, in many numbers of rows, through the very op table that sampler and trainer use, on its
device; and the check of whole numbers of 8 bits. Refuses: to trust a processor's name; what follows from the check
(``models.proof``, which also lets a whole small model of the family run).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels import functions
from tandem.kernels.impl.cpu import whole
from tandem.kernels.keys import KeyIndex
from tandem.kernels.ops import Ops

SHAPES = ((576, 960), (96, 1031))  # inputs, outputs: of a small model, and with ends of no whole block
ROWS = 131
COUNTS = (1, 2, 3, 4, 7, 8, 11, 16, 17, 32, 33, 63, 64, 65, 100)
BEGIN = 9  # the rows that are computed again do not begin where a block of the whole batch does
DRAWN = 1 << 20  # numbers that are drawn; larger tensors repeat them


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """What a family of models asks of the operations. ``window`` 0: none of its layers has one; ``shapes``: further
    projections, inputs and outputs."""

    head_dim: int = 32
    queries: int = 3  # heads that share keys
    window: int = 0
    activation: str = "silu"
    offset: bool = False
    routed: bool = False  # a router in float32 before experts
    shapes: tuple[tuple[int, int], ...] = ()


def varying(ops: Ops, dtype: torch.dtype, uses: Uses | None = None) -> list[str]:
    """Operations, each with the case, that gave a row other bits in a smaller batch; empty: none of those tried."""
    uses = uses or Uses()
    generator = torch.Generator().manual_seed(17)

    def drawn(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        numbers = torch.randn(min(size, DRAWN + 7), generator=generator).to(ops.device, dtype)
        return numbers.repeat(-(-size // len(numbers)))[:size].view(shape)

    found = []
    for num_in, num_out in (*SHAPES, *uses.shapes):
        x, weight = drawn(ROWS, num_in), drawn(num_out, num_in)
        whole = ops.linear(x, weight.requires_grad_()).detach()  # the trainer's road
        with torch.no_grad():
            found += _differing(f"linear {num_in} to {num_out}", whole, lambda rows: ops.linear(x[rows], weight))  # noqa: B023
    with torch.no_grad():
        for what, function, inputs in _rowwise(ops, uses, drawn):
            found += _differing(
                what, function(*inputs), lambda rows: function(*(each[rows] for each in inputs))  # noqa: B023
            )
        heads, size = 2 * uses.queries, uses.head_dim
        q_THD, k_SGD, v_SGD = drawn(ROWS, heads, size), drawn(ROWS, 2, size), drawn(ROWS, 2, size)
        for window in {0, uses.window}:
            found += _varying_attention(ops, q_THD, k_SGD, v_SGD, window)
    return found


def _rowwise(
    ops: Ops, uses: Uses, drawn: Callable[..., Tensor]
) -> Sequence[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Operations on rows: name, function, and what it takes rows of."""
    x_TD, up_TD, weight_D = drawn(ROWS, 576), drawn(ROWS, 576), drawn(576)
    heads_THD, head_D = drawn(ROWS, 3, uses.head_dim), drawn(uses.head_dim)
    angles_TD = drawn(ROWS, uses.head_dim).float()
    hidden_TD, head_VD = drawn(ROWS, 96), drawn(1031, 96)
    temperature_T = drawn(ROWS).float().abs() + 0.5
    targets_T = torch.arange(ROWS, device=ops.device) * 7
    uniform_T = (targets_T / (7.0 * ROWS)).double()

    def told(hidden: Tensor, temperature: Tensor, targets: Tensor) -> Tensor:
        return ops.token_logprobs(hidden, head_VD, targets, temperature, 64)[0]

    def sampled(hidden: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
        logits = ops.logits(hidden, head_VD)
        tokens, logprobs = functions.draw(logits, temperature, uniform, portable=ops.portable)
        return torch.stack([tokens.double(), logprobs.double()], dim=1)

    def normed(heads: Tensor) -> Tensor:
        return ops.rms_norm(heads.reshape(-1, uses.head_dim), head_D, 1e-5, offset=uses.offset).view(heads.shape)

    gate = ops.gelu_mul if uses.activation == "gelu_tanh" else ops.silu_mul
    found: list[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = [
        ("norm", lambda x: ops.rms_norm(x, weight_D, 1e-5, offset=uses.offset), (x_TD,)),
        ("norm of heads", normed, (heads_THD,)),
        ("gate", gate, (x_TD, up_TD)),
        ("rotation", ops.rope, (heads_THD, angles_TD.cos(), angles_TD.sin())),
        ("log-probability", told, (hidden_TD, temperature_T, targets_T)),
        ("draw", sampled, (hidden_TD, temperature_T, uniform_T)),
    ]
    if uses.routed:
        router_XD = drawn(9, 576).float()
        found.append(("router", lambda x: ops.linear(x.float(), router_XD).softmax(dim=1), (x_TD,)))
    return found


def _differing(what: str, whole: Tensor, again: Callable[[slice], Tensor]) -> list[str]:
    """The numbers of rows for which ``again`` gives other bits than ``whole`` has; read from the device once."""
    same = [
        (again(rows) == whole[rows]).all() for rows in (slice(BEGIN, BEGIN + count) for count in COUNTS)
    ]
    return [
        f"{what} of {count} rows" for count, equal in zip(COUNTS, torch.stack(same).tolist(), strict=True) if not equal
    ]


def _varying_attention(ops: Ops, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, window: int) -> list[str]:
    """The keys in other places, fewer rows."""
    slots, counts = torch.arange(ROWS, dtype=torch.int32), torch.arange(1, ROWS + 1, dtype=torch.int32)

    def attended(rows: slice, slots_L: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = torch.zeros(ROWS, dtype=torch.int64)[rows]
        slots_L, starts_T, counts_T = (each.contiguous().to(ops.device) for each in (slots_L, starts, counts[rows]))
        return ops.attention(q_THD[rows], k, v, KeyIndex(slots_L, starts_T, counts_T), 0.2, window)

    whole = attended(slice(0, ROWS), slots, k_SGD, v_SGD)
    what = f"attention in a window of {window}" if window else "attention"
    moved = slots.flip(0), k_SGD.flip(0), v_SGD.flip(0)
    return _differing(what, whole, lambda rows: attended(rows, *moved))


def prove_whole(ops: Ops) -> None:
    """Have projections in whole numbers of 8 bits give what plain whole numbers give, for every number of rows.

    Raises:
        EngineError: they do not on this machine.
    """
    draw = torch.Generator().manual_seed(17)
    for num_in, num_out in SHAPES:
        x, weight = (torch.randn(shape, generator=draw).bfloat16() for shape in ((ROWS, num_in), (num_out, num_in)))
        packed = whole.pack(weight)
        right = whole.linear(x, packed, num_out, road=0)
        for count in (*COUNTS, ROWS):
            begin = min(BEGIN, ROWS - count)
            rows = slice(begin, begin + count)
            if not torch.equal(whole.linear(x[rows], packed, num_out, road=ops.road), right[rows]):
                raise EngineError(f"the products of {count} rows in 8 bits are not what they should be on this machine",
                                  hint='set engine.quantize = "none", and test the machine')  # fmt: skip

