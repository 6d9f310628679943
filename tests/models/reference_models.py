"""Small Hugging Face models, written by the reference library, and a way to run ours on one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext
from tandem.models.causal_lm import CausalLM

COMMON = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=2,
)
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
# What a family needs beside the sizes that all have. Gemma: windows on five of six layers, shorter than the tests'
# sequences; a query scalar and rotary bases that are not the defaults.
OWN = {
    "gemma3_text": dict(num_hidden_layers=6, sliding_window=7, query_pre_attn_scalar=24, hidden_size=64),
    "qwen3_moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
}


def reference_model(kind: str, **changes: object) -> torch.nn.Module:
    """A random model of the reference library, norms and biases included, so that a lost one shows."""
    config_class, model_class = KINDS[kind]
    torch.manual_seed(3)
    model = model_class(config_class(**{**COMMON, **OWN.get(kind, {}), **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def save_reference(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: object
) -> torch.nn.Module:
    """Make a reference model and save it as a folder."""
    model = reference_model(kind, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def packed(lengths: Sequence[int]) -> tuple[torch.Tensor, AttentionContext]:
    """Positions and the causal context of sequences that lie one after another."""
    starts, counts, positions, begin = [], [], [], 0
    for length in lengths:
        starts += [begin] * length
        counts += range(1, length + 1)
        positions += range(length)
        begin += length
    keys = KeyIndex(
        slots_L=torch.arange(begin, dtype=torch.int32),
        starts_T=torch.tensor(starts, dtype=torch.int64),
        counts_T=torch.tensor(counts, dtype=torch.int32),
    )
    return torch.tensor(positions), AttentionContext(keys=keys)


def logits_of(model: CausalLM, *sequences: Sequence[int], checkpoint: bool = False) -> torch.Tensor:
    """Logits of packed sequences on the training road."""
    positions, context = packed([len(sequence) for sequence in sequences])
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    return model.ops.logits(model(ids, positions, context, checkpoint=checkpoint), model.head_weight)


def greedy(model: CausalLM, prompt: Sequence[int], num_new: int) -> list[int]:
    """The greedy continuation, by running everything again for each token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_new):
            tokens.append(int(logits_of(model, tokens)[-1].argmax()))
            if tokens[-1] in model.spec.eos_ids:
                break
    return tokens
