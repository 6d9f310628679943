"""Rows of logits through the C kernels: log-probabilities, and draws from them.

Owns: the description that ``head.c`` reads. Invariant: whatever is asked about a row, its log-probabilities have the
same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from tandem.core.errors import EngineError
from tandem.kernels.impl.cpu.build import library


class _Head(ctypes.Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("logits", "temperature", "targets", "uniform", "tokens", "logprobs",
                                       "entropies", "all")]
        + [(name, c_int64) for name in ("row", "rows", "size", "threads")]
    )  # fmt: skip


def supports(logits_TV: Tensor) -> bool:
    """Whether the kernels take these rows."""
    plain = logits_TV.device.type == "cpu" and logits_TV.dtype is torch.float32 and logits_TV.stride(-1) == 1
    return plain and library() is not None


def _run(logits_TV: Tensor, temperature_T: Tensor, **places: Tensor) -> None:
    temperature_T = temperature_T.float().contiguous()
    told = _Head(
        logits=logits_TV.data_ptr(), temperature=temperature_T.data_ptr(), row=logits_TV.stride(0),
        rows=logits_TV.shape[0], size=logits_TV.shape[1], threads=torch.get_num_threads(),
        **{name: place.data_ptr() for name, place in places.items()},
    )  # fmt: skip
    answer = library().head_rows
    answer.restype = c_int64
    if broken := answer(ctypes.byref(told)):
        raise EngineError(
            f"{broken} of {logits_TV.shape[0]} rows of logits have no finite distribution",
            hint="the weights or the temperature are not finite, or a mask left no token",
        )


def row_logprobs(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """All log-probabilities, float32 ``[T, V]``.

    Raises:
        EngineError: a row has no finite distribution; so for the functions below.
    """
    out_TV = torch.empty(logits_TV.shape, dtype=torch.float32)
    _run(logits_TV, temperature_T, all=out_TV)
    return out_TV


def target_logprobs(logits_TV: Tensor, temperature_T: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target and the row's entropy, both float32 ``[T]``."""
    logprobs_T, entropies_T = torch.empty(len(logits_TV)), torch.empty(len(logits_TV))
    _run(logits_TV, temperature_T, targets=targets_T.contiguous(), logprobs=logprobs_T, entropies=entropies_T)
    return logprobs_T, entropies_T


def draw(logits_TV: Tensor, temperature_T: Tensor, uniform_T: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row (int64) and its log-probability: the first at which the running sum of probabilities passes
    ``uniform`` (float64); the likeliest where that is negative."""
    tokens_T = torch.empty(len(logits_TV), dtype=torch.int64)
    logprobs_T = torch.empty(len(logits_TV))
    _run(logits_TV, temperature_T, uniform=uniform_T.contiguous(), tokens=tokens_T, logprobs=logprobs_T)
    return tokens_T, logprobs_T
