"""The layers in one call have the bits of the operations one by one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tandem.kernels.impl.cpu import projection
from tandem.kernels.ops import KeyIndex
from tandem.models.attention import AttentionContext, KVCache
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import init_model
from tandem.models.spec import ModelSpec, RopeSpec

PLAIN = ModelSpec(
    family="llama", vocab_size=97, hidden_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=32,
    intermediate_size=96, max_positions=128, tied_head=True,
)  # fmt: skip
KINDS = {
    "plain": PLAIN,
    "biases and query norms": replace(PLAIN, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "windows and norms behind": replace(
        PLAIN, windows=(4, 0, 7), local_rope=RopeSpec(theta=300.0), activation="gelu_tanh", unit_offset_norms=True,
        post_norms=True, scaled_embedding=True, query_scalar=20,
    ),
    "narrow heads": replace(PLAIN, head_dim=16, num_heads=4),
}  # fmt: skip

pytestmark = pytest.mark.skipif(not projection.road(), reason="no instructions for our own projections")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def filled(spec: ModelSpec) -> CausalLM:
    model = init_model(spec, seed=3, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms that do something
                parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter.dtype) * 0.3)
            else:  # and rows that differ, so that a comparison sees something
                parameter.mul_(6.0)
    return model


def whole(model: CausalLM, ids_T: torch.Tensor) -> torch.Tensor:
    """As the trainer computes a sequence."""
    count = len(ids_T)
    keys = KeyIndex(
        torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64),
        torch.arange(1, count + 1, dtype=torch.int32),
    )  # fmt: skip
    return model(ids_T, torch.arange(count), AttentionContext(keys=keys)).detach()


@torch.no_grad()
def in_chunks(model: CausalLM, ids_T: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """As the engine does, with another sequence's token in every call."""
    cache = KVCache(model.spec, 200, dtype=torch.bfloat16, device="cpu")
    slots = torch.randperm(190, generator=torch.Generator().manual_seed(1)).int() + 4
    found = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        positions = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(begin, end)))
        starts = torch.zeros(len(positions), dtype=torch.int64)
        starts[0] = len(slots) - 1
        context = AttentionContext(
            keys=KeyIndex(slots, starts, (positions + 1).int()), cache=cache,
            write_slots_T=slots[starts + positions].long(),
        )  # fmt: skip
        ids = torch.cat((torch.tensor([5]), ids_T[begin:end]))
        assert model._fused.takes(model.embedding(ids), context)
        found.append(model(ids, positions, context)[1:])
    return torch.cat(found)


@pytest.mark.parametrize(
    "road", [projection.TILES, projection.PAIRS, projection.SINGLES], ids=["tiles", "pairs", "singles"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_serving_gives_the_bits_of_training(kind: str, road: int, threads: int) -> None:
    if not projection.serves(road):
        pytest.skip("this machine has no such instructions")
    model = filled(KINDS[kind])
    model.ops.road = road
    ids_T = torch.randint(0, 97, (100,), generator=torch.Generator().manual_seed(2))
    expected = whole(model, ids_T)
    assert torch.equal(in_chunks(model, ids_T, [0, 1, 2, 40, 60, 61, 77, 100]), expected)
    assert float(expected.float().std(0).mean()) > 0.05


def test_changed_weights_are_seen_at_the_next_call() -> None:
    model = filled(PLAIN)
    ids_T = torch.arange(20)
    before = in_chunks(model, ids_T, [0, 20])
    with torch.no_grad():
        model.layers[1].mlp.down.weight.mul_(-1.0)
        model.layers[2].attention_norm.weight.add_(0.5)
    after = in_chunks(model, ids_T, [0, 20])
    assert not torch.equal(after, before)
    assert torch.equal(after, whole(model, ids_T))


def test_a_copy_of_a_model_has_weights_of_its_own() -> None:
    model, ids_T = filled(PLAIN), torch.arange(20)
    before = in_chunks(model, ids_T, [0, 20])
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].mlp.down.weight.mul_(-1.0)
    assert torch.equal(in_chunks(other, ids_T, [0, 20]), whole(other, ids_T))
    assert torch.equal(in_chunks(model, ids_T, [0, 20]), before)


def test_packed_weights_are_let_go_and_made_again() -> None:
    model, ids_T = filled(PLAIN), torch.arange(20)
    before = in_chunks(model, ids_T, [0, 20])
    packed = weakref.ref(model.ops.packed(model.layers[0].mlp.down.weight))
    model.forget_packed()
    assert packed() is None
    assert torch.equal(in_chunks(model, ids_T, [0, 20]), before)


def test_weights_held_packed_alone_give_the_same_bits_and_half_the_memory() -> None:
    model, ids_T = filled(PLAIN), torch.arange(20)
    before = in_chunks(model, ids_T, [0, 7, 20])
    logits = model.ops.logits(before.detach(), model.head_weight).detach()
    model.hold_packed()
    assert all(weight.untyped_storage().nbytes() == 2 for weight in model.packable().values())
    with torch.no_grad():
        assert torch.equal(in_chunks(model, ids_T, [0, 7, 20]), before)
        assert torch.equal(model.ops.logits(before, model.head_weight), logits)
    model.forget_packed()
    assert torch.equal(in_chunks(model, ids_T, [0, 20]), before)


def test_other_models_and_moments_take_the_operations() -> None:
    model = filled(PLAIN)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    keys = KeyIndex(torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.ones(2).int())
    cache = KVCache(PLAIN, 4, dtype=torch.bfloat16, device="cpu")
    served = AttentionContext(keys=keys, cache=cache, write_slots_T=torch.zeros(2, dtype=torch.int64))
    with torch.no_grad():
        assert model._fused.takes(x, served)
        assert not model._fused.takes(x, AttentionContext(keys=keys))
        assert not model._fused.takes(x.float(), served)
        odd = init_model(replace(PLAIN, intermediate_size=75), seed=0, dtype=torch.bfloat16)
        assert not odd._fused.takes(x, served)
    assert not model._fused.takes(x, served)  # gradients are wanted
