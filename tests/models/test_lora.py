"""Adapters: nothing at first, exact to take off, merged like computed, and the numbers of the formula."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference_models import logits_of, save_reference
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.core.errors import ModelError
from tandem.core.types import ids
from tandem.engine.train.batch import lay_out
from tandem.models.attention import AttentionContext
from tandem.models.loader import load_model
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


IDS = [5, 9, 3, 77, 41, 8, 8, 60]
MODULES = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}


def stirred(parameters) -> None:
    """Far from what they begin with: updates of B = 0 would be no test."""
    torch.manual_seed(0)
    for name, parameter in parameters:
        if "lora_B" in name or name.endswith("adapter.b"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "magnitude" in name:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_peft_computes_the_same_with_what_we_save(kind, dora, tmp_path) -> None:
    save_reference(tmp_path / "base", kind)
    loaded = load_model(tmp_path / "base", dtype=torch.float32)
    ours = add_adapters(loaded, LoraSpec(rank=3, alpha=6.0, dora=dora), seed=1)
    stirred(ours.named_parameters())
    save_adapters(ours, tmp_path / "out", base=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        plain = base(torch.tensor([IDS])).logits[0]
        theirs = PeftModel.from_pretrained(base, tmp_path / "out").eval()(torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(logits_of(ours, IDS), theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(logits_of(merged_copy(ours), IDS), theirs, atol=1e-4, rtol=0)
    assert (theirs - plain).abs().max() > 0.05


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
def test_what_peft_saves_computes_the_same_here(targets, dora, tmp_path) -> None:
    save_reference(tmp_path / "base", "llama")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    modules = MODULES.get(targets, MODULES["attention"] + MODULES["mlp"])
    theirs = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=modules, use_dora=dora)).eval()
    stirred(theirs.named_parameters())
    theirs.save_pretrained(tmp_path / "out")
    ours = load_adapters(load_model(tmp_path / "base", dtype=torch.float32), tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(ours, IDS), theirs(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=0
        )  # fmt: skip


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_bfloat16_model_is_merged_in_float32_and_rounded_once(dora) -> None:
    model = add_adapters(tiny_model(dtype=torch.bfloat16), LoraSpec(rank=3, alpha=6.0, dora=dora), seed=1)
    stirred(model.named_parameters())
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged = merged_copy(model)
    for name, adapter in adapters_of(model).items():
        weight = model.get_submodule(name).weight
        whole = weight.double() + torch.cat([
            adapter.scale * adapter.b[start:stop].double() @ adapter.a[3 * n : 3 * n + 3].double()
            for n, (start, stop) in enumerate(adapter.parts)
        ])  # fmt: skip
        if dora:
            whole *= (adapter.magnitude.double() / whole.norm(dim=1))[:, None]
        found = merged.get_submodule(name).weight
        assert found.dtype == torch.bfloat16 and not torch.equal(found, weight)
        # one rounding: half a step of 8 bits of mantissa, and what float32 lost on the way
        assert ((found.double() - whole).abs() <= whole.abs() * 2**-8 + 1e-6).all()
        assert (found == whole.to(torch.bfloat16)).float().mean() > 0.99
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
