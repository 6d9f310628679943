"""[engine]: the inference and the train engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section

AtPublish = Literal["keep", "reprefill", "abort"]


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
    at_publish: AtPublish = "keep"
    """What becomes of requests under way when weights are published. `keep`: they go on from the keys and values that
    they have, made by the old weights; `reprefill`: their prompt and answer so far are computed again under the new
    ones; `abort`: those with an answer begun end and return all they have (see `rollout.at_abort`), the others begin
    anew. Each token says which weights it was sampled under."""
    swap_tokens: int = Field(default=0, ge=0)
    """Tokens of KV that CPU memory holds for what the cache has no room for: preempted requests and episodes that
    wait for a tool. Used where copying costs less than computing again, which is measured. Where the model is on the
    CPU, a larger `kv_tokens` does the same without copies."""

    record_routes: bool = False
    """Of a mixture of experts: record which experts each token went through. Training then takes the same ones (routing
    replay), with weights from its own router: where sampler and trainer differ in a bit, a token near the border of
    two experts would else be trained through one that never made it. Of no use with exact numerics and fresh samples,
    where both choose alike."""


class TrainSection(Section):
    micro_batch_tokens: int = Field(default=2048, ge=16)
    """Most distinct tokens in one forward and backward pass. The gradient does not depend on it."""
    share_prefixes: bool = True
    """Compute the common prompt of sibling samples once. The gradient does not depend on it."""
    balance_weight: float = Field(default=0, ge=0)
    """Of a mixture of experts: weight of the loss that spreads tokens over the experts, for each sequence by itself and
    over the tokens that are learned. The metric `imbalance` is 1 where all experts are used alike."""
    checkpoint_activations: bool = False
    """Recompute layer activations in the backward pass: less memory, about a third more time."""
    hand_over: bool = False
    """Hand memory over between sampling and training (`rollout.staleness = 0`): the engine gives its KV cache back
    while a step trains, and the reference, teacher and reward model wait in the memory of the CPU while they are not
    asked, where the device is another one."""


class EngineSection(Section):
    name: Literal["tandem", "vllm"] = "tandem"
    """Inference engine. `vllm`: vLLM in a process of its own, under `python`, on a copy of the weights that each
    publish renews; it neither forks, nor follows guides, nor sleeps, and its log-probabilities are the trainer's but
    for a measured gap (`logprob_gap_mean`, `kl_sampler_k3`), so set `algorithm.importance`."""
    python: str = ""
    """Interpreter of the environment in which a foreign engine is installed, with a torch of its own; empty: this
    one."""
    process: bool = False
    """Sample in a process of its own, on a copy of the weights that each publish renews: inference and training then
    share nothing but the machine."""
    transport: str = "shared_memory"
    """How weights get to that process: `shared_memory`, or a plug-in of the kind `transport`."""
    numerics: Literal["exact", "fast"] = "exact"
    """`exact`: the sampler's and the trainer's log-probabilities are bit-equal for any batch, which is
    checked at the start (where it does not hold, a warning says so and `fast` is used); `fast`: stock operations."""
    quantize: Literal["none", "int8"] = "none"
    """`int8`: sample by weights in whole numbers of 8 bits (one scale an output), made anew of the live ones at each
    publish: half the memory to read, which is what a few sequences at once wait for. Training stays as it is; its
    samples are then from another policy by a measured gap (`logprob_gap_mean`, `kl_sampler_k3`), which ratios and
    `algorithm.importance` correct. Dense bfloat16 models without adapters, on the CPU."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for model computation; 0: one for each core this process may use."""
    infer: InferSection = InferSection()
    train: TrainSection = TrainSection()
