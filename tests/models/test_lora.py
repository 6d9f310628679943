"""Adapters: nothing at first, exact to take off, merged like computed, and the numbers of the formula."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tandem.core.errors import ModelError
from tandem.core.types import ids
from tandem.engine.train.batch import lay_out
from tandem.models.attention import AttentionContext
from tandem.models.lora import (
    LoraSpec,
    adapters_of,
    add_adapters,
    load_adapters,
    merged_copy,
    read_adapter_spec,
    save_adapters,
)
from tests.engine.train.tiny import tiny_model


def hidden(model) -> torch.Tensor:
    layout = lay_out([ids([1, 5, 9, 2, 7, 7, 3])], share_prefixes=False, device=torch.device("cpu"))
    with torch.no_grad():
        return model(layout.ids_T, layout.positions_T, AttentionContext(keys=layout.keys))


def adapted(*, dora: bool = False, targets: str = "all"):
    model = add_adapters(tiny_model(), LoraSpec(rank=3, alpha=6.0, targets=targets, dora=dora), seed=1)
    torch.manual_seed(0)
    for adapter in adapters_of(model).values():
        torch.nn.init.normal_(adapter.b, std=0.3)
    return model


@pytest.mark.parametrize("dora", [False, True])
def test_fresh_adapters_change_nothing_and_train_alone(dora) -> None:
    model = add_adapters(tiny_model(), LoraSpec(rank=3, alpha=6.0, dora=dora), seed=1)
    assert torch.allclose(hidden(model), hidden(tiny_model()), atol=1e-6)
    assert all((".adapter." in name) == p.requires_grad for name, p in model.named_parameters())
    assert len(adapters_of(model)) == 8


@pytest.mark.parametrize("dora", [False, True])
def test_merging_computes_the_same_and_leaves_the_model_as_it_is(dora) -> None:
    model = adapted(dora=dora)
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged = merged_copy(model)
    assert not adapters_of(merged) and torch.allclose(hidden(merged), hidden(model), atol=1e-5)
    assert not torch.allclose(hidden(model), hidden(tiny_model()), atol=1e-2)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_a_merged_weight_is_the_papers_formula_for_each_projection_that_files_keep_apart(dora, tmp_path) -> None:
    model = adapted(dora=dora)
    save_adapters(model, tmp_path / "out", base="base")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    base = tiny_model().get_parameter("layers.1.attention.qkv.weight")[32:48].double()
    whole = base + 2.0 * tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
    if dora:
        whole = tensors[f"{name}.lora_magnitude_vector"].double()[:, None] * whole / whole.norm(dim=1, keepdim=True)
    merged = merged_copy(model).get_parameter("layers.1.attention.qkv.weight")[32:48]
    assert torch.allclose(merged.double(), whole, atol=1e-6)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (3, 6.0, dora)
    assert "q_proj" in config["target_modules"]


@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
def test_what_is_saved_comes_back(targets, tmp_path) -> None:
    model = adapted(dora=True, targets=targets)
    save_adapters(model, tmp_path / "out", base="base")
    again = load_adapters(tiny_model(), tmp_path / "out")
    assert torch.equal(hidden(again), hidden(model))
    assert read_adapter_spec(tmp_path / "out") == LoraSpec(rank=3, alpha=6.0, targets=targets, dora=True)


def test_an_adapter_of_another_model_is_refused(tmp_path) -> None:
    save_adapters(adapted(), tmp_path / "out", base="base")
    from dataclasses import replace

    from tandem.models.loader import init_model
    from tests.engine.train.tiny import SPEC

    smaller = init_model(replace(SPEC, num_layers=1), seed=0, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"no place for .*layers\.1"):
        load_adapters(smaller, tmp_path / "out")
    with pytest.raises(ModelError, match="no adapters"):
        save_adapters(tiny_model(), tmp_path / "none", base="base")
