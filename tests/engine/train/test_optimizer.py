"""AdamW: resume (W9), clipping, masters, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.errors import EngineError, RecordError
from tandem.engine.train.optimizer import AdamW, global_norm

PLAIN = OptimizerSection(learning_rate=0.1, beta1=0.9, beta2=0.999, epsilon=1e-12, max_grad_norm=0.0)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(5, 3).to(dtype))
        self.norm = nn.Parameter(torch.randn(3).to(dtype))


def push(model: nn.Module, optimizer: AdamW, value: float, rate: float = 0.1) -> float:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.accumulate()
    return optimizer.step(rate)


def test_w9_moments_survive_a_resume() -> None:
    model = Small()
    optimizer = AdamW(model, PLAIN)
    for _ in range(5):
        push(model, optimizer, 1.0)
    saved = (
        {k: v.clone() for k, v in optimizer.weights().items()},
        {k: v.clone() for k, v in optimizer.moments().items()},
    )
    again = Small(seed=9)
    resumed = AdamW(again, PLAIN)
    resumed.restore(*saved)
    assert torch.equal(again.matrix, model.matrix)
    before = again.matrix.detach().clone()
    push(again, resumed, -1.0)
    assert torch.allclose(again.matrix - before, torch.tensor(-0.573159 * 0.1), atol=1e-6)
    push(model, optimizer, -1.0)
    assert torch.equal(again.matrix, model.matrix) and torch.equal(again.norm, model.norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_textbook_and_counts_versions(dtype) -> None:
    section = OptimizerSection(beta1=0.8, beta2=0.95, epsilon=1e-8, weight_decay=0.1, max_grad_norm=0.0)
    model = Small(dtype)
    optimizer = AdamW(model, section)
    masters = {name: p.detach().double() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in masters.items()}
    second = {name: torch.zeros_like(p) for name, p in masters.items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 6):
        versions = [p._version for p in model.parameters()]
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            g = parameter.grad.double()
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            decay = 1 - 0.01 * 0.1 if parameter.dim() > 1 else 1.0
            update = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            masters[name] = masters[name] * decay - 0.01 * update
        optimizer.accumulate()
        optimizer.step(0.01)
        assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
    for name, parameter in model.named_parameters():
        assert torch.allclose(optimizer.weights()[name].double(), masters[name], atol=1e-6)
        assert torch.equal(parameter, optimizer.weights()[name].to(dtype))


def test_micro_batch_gradients_are_summed_in_float32() -> None:
    model = Small(torch.bfloat16)
    optimizer = AdamW(model, PLAIN.model_copy(update={"max_grad_norm": 0.0}))
    for value in [256.0] + [0.5] * 8:  # bfloat16 would lose every 0.5
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.accumulate()
    assert optimizer.step(0.1) == pytest.approx(260.0 * 18**0.5)


def test_the_norm_is_true_for_many_elements_and_clips() -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert float(global_norm([values, values[:7]])) == pytest.approx(
        float((values.double().square().sum() + values[:7].double().square().sum()).sqrt()), rel=1e-7
    )
    # With a first moment only (beta2 near 0 makes the update scale-free), compare the moment itself.
    model = Small()
    optimizer = AdamW(model, OptimizerSection(max_grad_norm=0.5, beta1=0.0))
    norm = push(model, optimizer, 3.0)
    assert norm == pytest.approx(3.0 * 18**0.5)
    assert optimizer.moments()["exp_avg.norm"].tolist() == pytest.approx([0.5 / 18**0.5] * 3)


def test_a_parameter_without_gradient_still_follows_its_momentum() -> None:
    model = Small()
    optimizer = AdamW(model, PLAIN)
    push(model, optimizer, 1.0)
    before = model.norm.detach().clone()
    optimizer.step(0.1)
    assert not torch.equal(before, model.norm) and optimizer.moments()["step.norm"] == 2


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named() -> None:
    model = Small()
    optimizer = AdamW(model, PLAIN)
    before = model.matrix.detach().clone()
    model.matrix.grad = torch.ones_like(model.matrix)
    model.norm.grad = torch.tensor([1.0, float("nan"), 1.0])
    with pytest.raises(EngineError, match="norm"):
        optimizer.step(0.1)
    assert torch.equal(before, model.matrix) and not optimizer.moments() and model.norm.grad is None


def test_another_models_state_is_refused() -> None:
    model = Small()
    optimizer = AdamW(model, PLAIN)
    good = dict(optimizer.weights())
    with pytest.raises(RecordError, match="names differ"):
        optimizer.restore({"matrix": good["matrix"]}, {})
    with pytest.raises(RecordError, match="shape"):
        optimizer.restore(good | {"norm": torch.zeros(4)}, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_masters_apart_give_the_same_bits(dtype, moments) -> None:
    """What offloading does, but for the device: copies of the weights are updated, and written back."""
    section = OptimizerSection(beta1=0.8, weight_decay=0.1, max_grad_norm=0.5, moments=moments, offload=True)
    plain, moved = Small(dtype), Small(dtype)
    here, apart = AdamW(plain, section), AdamW(moved, section, apart=True)
    assert apart.weights()["matrix"].data_ptr() != moved.matrix.data_ptr()
    assert apart.weights()["matrix"].dtype is torch.float32
    generator = torch.Generator().manual_seed(1)

    def learn(*pairs: tuple[nn.Module, AdamW]) -> list[float]:
        for _ in range(2):
            drawn = [torch.randn(p.shape, generator=generator).to(dtype) for p in plain.parameters()]
            for model, optimizer in pairs:
                for parameter, gradient in zip(model.parameters(), drawn, strict=True):
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
                optimizer.accumulate()
        return [optimizer.step(0.01) for _, optimizer in pairs]

    for _ in range(4):
        one, other = learn((plain, here), (moved, apart))
        assert one == other > 0.5
    saved = [{name: tensor.clone() for name, tensor in each.items()} for each in (apart.weights(), apart.moments())]
    again = Small(dtype, seed=9)
    resumed = AdamW(again, section, apart=True)
    resumed.restore(saved[0], saved[1])
    learn((plain, here), (moved, apart), (again, resumed))
    for name, parameter in plain.named_parameters():
        for model in (moved, again):
            assert torch.equal(parameter, dict(model.named_parameters())[name])
    with torch.no_grad():
        moved.matrix.fill_(2.0)
    apart.refresh()
    assert torch.equal(apart.weights()["matrix"], torch.full((5, 3), 2.0))


def test_where_the_weights_are_on_the_cpu_offloading_changes_nothing() -> None:
    model = Small()
    optimizer = AdamW(model, PLAIN.model_copy(update={"offload": True}))
    assert optimizer.weights()["matrix"].data_ptr() == model.matrix.data_ptr()
