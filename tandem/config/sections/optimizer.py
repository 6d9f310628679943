"""[optimizer]: AdamW and its schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class OptimizerSection(Section):
    learning_rate: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=2, ge=0)
    """Steps of linear warm-up; step s (from 1) uses s / warmup_steps of the peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls from the end of the warm-up to the last step."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Part of the peak that the decay ends at."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; norms and biases are exempt."""
    moments: Literal["float32", "8bit"] = "float32"
    """What the two moments of the matrices are kept as: `8bit` takes a quarter of the memory, is rounded in blocks of
    256 numbers, and costs some time at each update."""
    offload: bool = False
    """Keep masters and moments on the CPU, and update there, while the weights are on an accelerator; where those are
    on the CPU it changes nothing."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Clip the global gradient norm to this; 0: no clipping."""
