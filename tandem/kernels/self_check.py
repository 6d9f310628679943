"""Whether a row really has the same bits in every batch on this machine: libraries promise no such thing.

Owns: the check and what follows from it. Refuses: to trust a processor's name. It runs once at the start of an
engine, in well under a second, through the very op table that sampler and trainer use.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tandem.kernels.ops import KeyIndex, Ops

log = logging.getLogger(__name__)
SHAPES = ((576, 960), (96, 1031))  # inputs, outputs: of a small model, and with ends of no whole block
ROWS = 131
COUNTS = (1, 2, 3, 4, 7, 8, 11, 16, 17, 32, 33, 63, 64, 65, 100)
BEGIN = 9  # the rows that are computed again do not begin where a block of the whole batch does


def varying(ops: Ops, dtype: torch.dtype) -> list[str]:
    """Operations, each with the case, that gave a row other bits in a smaller batch; empty: none of those tried."""
    draw = torch.Generator().manual_seed(17)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    found = []
    for num_in, num_out in SHAPES:
        x, weight = drawn(ROWS, num_in), drawn(num_out, num_in)
        whole = ops.linear(x, weight.requires_grad_()).detach()  # the trainer's road
        with torch.no_grad():
            for count in COUNTS:
                rows = slice(BEGIN, BEGIN + count)
                if not torch.equal(ops.linear(x[rows], weight), whole[rows]):
                    found.append(f"linear {num_in} to {num_out} of {count} rows")
    with torch.no_grad():
        found += _varying_attention(ops, drawn(ROWS, 6, 32), drawn(ROWS, 2, 32), drawn(ROWS, 2, 32))
        x, weight, up = drawn(ROWS, 576), drawn(576), drawn(ROWS, 576)
        norm, gate = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x, up)
        for count in COUNTS:
            rows = slice(BEGIN, BEGIN + count)
            if not torch.equal(ops.rms_norm(x[rows], weight, 1e-5), norm[rows]):
                found.append(f"norm of {count} rows")
            if not torch.equal(ops.silu_mul(x[rows], up[rows]), gate[rows]):
                found.append(f"gate of {count} rows")
    return found


def _varying_attention(ops: Ops, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> list[str]:
    """The keys in other places, fewer rows."""
    slots, counts = torch.arange(ROWS, dtype=torch.int32), torch.arange(1, ROWS + 1, dtype=torch.int32)
    whole = ops.attention(q_THD, k_SGD, v_SGD, KeyIndex(slots, torch.zeros(ROWS, dtype=torch.int64), counts), 0.2)
    moved = slots.flip(0).contiguous()
    found = []
    for count in COUNTS:
        rows = slice(BEGIN, BEGIN + count)
        index = KeyIndex(moved, torch.zeros(count, dtype=torch.int64), counts[rows].contiguous())
        if not torch.equal(ops.attention(q_THD[rows], k_SGD.flip(0), v_SGD.flip(0), index, 0.2), whole[rows]):
            found.append(f"attention of {count} rows")
    return found


def proven(numerics: str, dtype: torch.dtype, device: torch.device | str) -> str:
    """``numerics``, or ``fast`` (and a warning that names what varies) where ``exact`` does not hold."""
    if numerics != "exact":
        return numerics
    found = varying(Ops(numerics, device), dtype) if torch.device(device).type == "cpu" else []
    if not found:
        return numerics
    log.warning(
        "exact numerics do not hold on this machine: the bits of a row depend on its batch in %d cases (%s). Going on "
        "with fast numerics: log-probabilities of sampler and trainer differ a little. Set engine.numerics to fast to "
        "say so in the recipe",
        len(found),
        ", ".join(found[:4]),
    )
    return "fast"
