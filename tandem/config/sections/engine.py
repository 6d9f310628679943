"""[engine]: the inference and the train engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class InferSection(Section):
    max_num_seqs: int = Field(default=64, ge=1)
    """Most sequences that decode in one step."""
    max_step_tokens: int = Field(default=1024, ge=16)
    """Token budget of one engine step; longer prompts are prefilled in chunks beside decoding."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in one KV block."""
    kv_tokens: int = Field(default=32768, ge=64)
    """Size of the KV cache, in tokens."""
    prefix_cache: bool = True
    """Reuse the KV of equal prefixes made under the same weight version."""
    swap_tokens: int = Field(default=0, ge=0)
    """Tokens of KV that CPU memory holds for what the cache has no room for: preempted requests and episodes that
    wait for a tool. Used where copying costs less than computing again, which is measured. Where the model is on the
    CPU, a larger `kv_tokens` does the same without copies."""


class TrainSection(Section):
    micro_batch_tokens: int = Field(default=2048, ge=16)
    """Most distinct tokens in one forward and backward pass. The gradient does not depend on it."""
    share_prefixes: bool = True
    """Compute the common prompt of sibling samples once. The gradient does not depend on it."""
    checkpoint_activations: bool = False
    """Recompute layer activations in the backward pass: less memory, about a third more time."""


class EngineSection(Section):
    name: Literal["tandem"] = "tandem"
    """Inference engine."""
    process: bool = False
    """Sample in a process of its own, on a copy of the weights that each publish renews: inference and training then
    share nothing but the machine."""
    transport: str = "shared_memory"
    """How weights get to that process: `shared_memory`, or a plug-in of the kind `transport`."""
    numerics: Literal["exact", "fast"] = "exact"
    """`exact`: the sampler's and the trainer's log-probabilities are bit-equal for any batch, which is
    checked at the start (where it does not hold, a warning says so and `fast` is used); `fast`: stock operations."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for model computation; 0: one for each core this process may use."""
    infer: InferSection = InferSection()
    train: TrainSection = TrainSection()
