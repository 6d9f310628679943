"""Moments in 8 bits: what is rounded stays, a shard has its part's bytes, and training is nearly that of float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.algorithms.catalog.sft import SFT
from tandem.algorithms.credit import demonstration
from tandem.config.sections.optimizer import OptimizerSection
from tandem.core.types import ids, mask
from tandem.engine.train.eight_bit import BLOCK, EightBitAdamW, Group, dynamic_map, layout, quantise, restored
from tests.engine.train.tiny import VOCABULARY, tiny_model, train


def drawn(rows: int, columns: int, seed: int, *, signed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 3, (rows, 1), generator=generator)
    values = torch.randn(rows, columns, generator=generator) * sizes
    return values if signed else values.square()


@pytest.mark.parametrize(("signed", "codes"), [(True, 255), (False, 254)])
def test_the_map_rises_to_one_and_the_second_moment_has_no_zero(signed: bool, codes: int) -> None:
    values = dynamic_map(signed=signed)
    assert len(values) == codes and float(values[-1]) == 1.0 and bool((values[1:] > values[:-1]).all())
    assert torch.equal(values, -values.flip(0)) if signed else float(values[0]) > 0


@given(rows=st.integers(0, 5), columns=st.integers(1, 600), seed=st.integers(0, 99), signed=st.booleans())
def test_what_was_rounded_is_rounded_to_itself_and_rows_are_apart(rows, columns, seed, signed) -> None:
    values = drawn(rows, columns, seed, signed=signed)
    codes, scales = quantise(values, signed=signed)
    assert codes.shape == values.shape and scales.shape == (rows, -(-columns // BLOCK))
    back = restored(codes, scales, signed=signed)
    again, same = quantise(back, signed=signed)
    assert torch.equal(again, codes) and torch.equal(same, scales)
    shard, shard_scales = quantise(values[1:3], signed=signed)
    assert torch.equal(shard, codes[1:3]) and torch.equal(shard_scales, scales[1:3])
    if rows:
        largest = scales.repeat_interleave(BLOCK, dim=1)[:, :columns]
        assert bool(((back - values).abs() <= 0.01 * largest).all())
        big = values.abs() > 0.1 * largest
        assert bool(((back - values).abs() <= 0.08 * values.abs())[big].all())


def test_an_update_is_that_of_float32_as_far_as_the_moments_are() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 700, generator=generator)
    theirs, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    eight = EightBitAdamW([Group(params=[ours], lr=1e-2, weight_decay=0.1)], betas=(0.9, 0.99), eps=1e-8)
    for step in range(30):
        theirs.grad = torch.randn(8, 700, generator=generator)
        ours.grad = theirs.grad.clone()
        adamw.step(), eight.step()
        if not step:  # nothing was rounded before the first one
            assert torch.allclose(theirs, ours, atol=1e-7, rtol=0)
    moved, apart = (float(each.detach().abs().mean()) for each in (theirs - start, theirs - ours))
    assert 0 < apart < 0.05 * moved
    kept = {part: (tuple(each.shape), each.dtype) for part, each in eight.state[ours].items() if part != "step"}
    assert kept == layout((8, 700))


def test_a_loss_curve_is_near_that_of_float32_moments() -> None:
    generator = torch.Generator().manual_seed(1)
    streams = [torch.randint(1, VOCABULARY, (12,), generator=generator).tolist() for _ in range(8)]
    rows = [demonstration(f"r{n}", ids(stream), mask([0] + [1] * 11)) for n, stream in enumerate(streams)]
    curves = {
        moments: [
            result.loss
            for result in train(
                tiny_model(), SFT, rows, steps=60,
                optimizer=OptimizerSection(learning_rate=5e-3, warmup_steps=3, moments=moments),
            )
        ]
        for moments in ("float32", "8bit")
    }  # fmt: skip
    wanted, got = (torch.tensor(curves[moments]) for moments in ("float32", "8bit"))
    assert float(wanted[-1]) < 0.5 * float(wanted[0])
    assert not torch.equal(wanted, got)
    assert float((wanted - got).abs().max()) < 0.03 * float(wanted[0])
