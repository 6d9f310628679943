"""Our definition against the reference library, and against itself on the engine's road."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference_models import logits_of, packed, save_reference

from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext, KVCache
from tandem.models.family import find_family, read_config
from tandem.models.loader import init_model, load_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
MODELS = {
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 untied": ("qwen3", {"head_dim": 32}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen3 windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", {}),
    "gemma3 untied, other ropes": ("gemma3_text", {"tie_word_embeddings": False, "rope_parameters": GEMMA_ROPES}),
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3 moe, some layers dense": ("qwen3_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen3 moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2, "num_experts_per_tok": 6}),
}
IDS = [5, 9, 3, 77, 41, 8, 8, 60, 13, 90, 22, 31, 4, 55, 67, 18, 2, 11, 35, 6] * 3


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_reference_library(name: str, tmp_path: Path):
    kind, changes = MODELS[name]
    theirs = save_reference(tmp_path / "model", kind, **changes)
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        expected = [theirs(torch.tensor([IDS])).logits[0], theirs(torch.tensor([IDS[:7]])).logits[0]]
        torch.testing.assert_close(logits_of(ours, IDS, IDS[:7]), torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_gradients_equal_the_reference_library(kind: str, tmp_path: Path):
    # No pad id: where it is the end id too, the reference gives the end token's embedding no gradient.
    theirs = save_reference(tmp_path / "model", kind, tie_word_embeddings=True, pad_token_id=None)
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    theirs(torch.tensor([IDS])).logits[0].logsumexp(-1).sum().backward()
    logits_of(ours, IDS).logsumexp(-1).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = dict(ours.named_parameters())
    for piece in find_family(kind, where="test").pieces(ours.spec):
        grad = found[piece.parameter].grad[piece.start : piece.stop]
        torch.testing.assert_close(grad, expected[piece.source], atol=2e-3, rtol=2e-3, msg=piece.source)


def test_gradients_of_a_mixture_equal_the_reference_library(tmp_path: Path):
    theirs = save_reference(tmp_path / "model", "qwen3_moe", mlp_only_layers=[1], pad_token_id=None)
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    theirs(torch.tensor([IDS])).logits[0].logsumexp(-1).sum().backward()
    logits_of(ours, IDS).logsumexp(-1).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for layer in (0, 2):  # the library keeps a layer's experts in one tensor, files do not
        names = f"model.layers.{layer}.mlp.experts."
        both, down = (expected.pop(f"{names}{part}_proj") for part in ("gate_up", "down"))
        for number, (gate, up) in enumerate(grad.chunk(2) for grad in both):
            expected |= {f"{names}{number}.gate_proj.weight": gate, f"{names}{number}.up_proj.weight": up}
            expected[f"{names}{number}.down_proj.weight"] = down[number]
    found = dict(ours.named_parameters())
    for piece in find_family("qwen3_moe", where="test").pieces(ours.spec):
        whole = found[piece.parameter].grad
        grad = torch.zeros_like(expected[piece.source]) if whole is None else whole[piece.start : piece.stop]
        torch.testing.assert_close(grad, expected.pop(piece.source), atol=2e-3, rtol=2e-3, msg=piece.source)
    assert not expected


def test_recomputed_activations_give_the_same_gradient(tmp_path: Path):
    save_reference(tmp_path / "model", "qwen3")
    grads = []
    for checkpoint in (False, True):
        model = load_model(tmp_path / "model", dtype=torch.float32)
        logits_of(model, IDS, IDS[:5], checkpoint=checkpoint).logsumexp(-1).sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ["llama llama3 rope", "qwen3 windows", "gemma3", "qwen3 moe, some layers dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_road_gives_the_bits_of_the_training_road(name: str, dtype: torch.dtype, tmp_path: Path):
    kind, changes = MODELS[name]
    save_reference(tmp_path / "model", kind, **changes)
    model = load_model(tmp_path / "model", dtype=dtype)
    first, second = torch.tensor(IDS[:23]), torch.tensor(IDS[5:16])
    positions, context = packed([23, 11])
    trained = model(torch.cat((first, second)), positions, context).detach()

    # Two sequences in scattered slots, fed together in uneven chunks.
    cache = KVCache(model.spec, 64, dtype=dtype, device="cpu")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    slots = {0: order[:23], 1: order[23:34]}
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    with torch.no_grad():
        for bounds in ([(0, 0, 9), (1, 0, 1)], [(1, 1, 2), (0, 9, 10)], [(0, 10, 23), (1, 2, 11)]):
            ids, positions, writes, starts, counts = [], [], [], [], []
            for which, start, stop in bounds:
                sequence = (first, second)[which]
                ids += sequence[start:stop].tolist()
                positions += range(start, stop)
                writes += slots[which][start:stop].tolist()
                starts += [0 if which == 0 else 23] * (stop - start)
                counts += range(start + 1, stop + 1)
            keys = KeyIndex(
                slots_L=torch.cat((slots[0], slots[1])).to(torch.int32),
                starts_T=torch.tensor(starts),
                counts_T=torch.tensor(counts, dtype=torch.int32),
            )
            context = AttentionContext(keys=keys, cache=cache, write_slots_T=torch.tensor(writes))
            hidden = model(torch.tensor(ids), torch.tensor(positions), context)
            at = 0
            for which, start, stop in bounds:
                rows[which].append(hidden[at : at + stop - start])
                at += stop - start
    assert torch.equal(torch.cat([*rows[0], *rows[1]]), trained)


def test_random_models_repeat_and_differ_by_seed():
    spec = read_config(
        {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2}, where="test",
    )
    one, same, other = (init_model(spec, seed=seed, dtype=torch.float32) for seed in (1, 1, 2))
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head_weight, other.head_weight)
    logits = logits_of(one, [1, 2, 3])
    assert torch.isfinite(logits).all()
    assert logits.softmax(-1).max() < 0.2
