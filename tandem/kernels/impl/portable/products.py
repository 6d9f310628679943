"""Products of matrices where no row needs bits of its own: the backward pass.

Owns: what is done where PyTorch's library has no bfloat16 products for the processor (no AVX512). PyTorch's own loops
then do 8 to 15 GFLOP/s where float32 does 110, so the factors are widened and the product is rounded once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def has_bfloat16() -> bool:
    """Whether PyTorch's library has bfloat16 products for this processor."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and bool(asked())


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """``a @ b``."""
    if a_MK.dtype is torch.bfloat16 and a_MK.device.type == "cpu" and not has_bfloat16():
        return (a_MK.float() @ b_KN.float()).bfloat16()
    return a_MK @ b_KN
