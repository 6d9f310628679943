"""One step's updates: the streams a method needs come before, every plan is trained, and results are one."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from bare_methods import GRPO

from tandem.config.sections.engine import TrainSection
from tandem.core.errors import EngineError
from tandem.core.types import StepResult
from tandem.trainer.batcher import Batcher
from tandem.trainer.update import check_roles, merge_results, update
from tests.trainer.pieces import CountingEngine, MemorySink, record


def test_samples_carry_the_reference_and_every_pass_is_an_update() -> None:
    spec = dataclasses.replace(GRPO, kl_weight=0.1, passes=3)
    batcher = Batcher(spec, TrainSection(), staleness=0, sink=MemorySink())
    samples = batcher.admit([record("a", [1.0, 0.0])], version=0).samples
    engine, reference = CountingEngine(), CountingEngine()
    result = asyncio.run(
        update(4, samples, batcher, train=engine.step, score=engine.score, reference=reference.score)
    )
    assert [plan.step for plan in engine.plans] == [4, 4, 4] and result.metrics["updates"] == 3.0
    trained = [sample for row in engine.plans[0].rows for sample in row]
    assert all(set(sample.reference_logprobs or ()) == {-2.0} for sample in trained) and len(trained) == 2
    assert all(sample.old_logprobs is None for sample in trained)


def test_a_missing_role_is_named() -> None:
    with pytest.raises(EngineError, match="reference"):
        check_roles(dataclasses.replace(GRPO, kl_weight=0.1), None, None)
    with pytest.raises(EngineError, match="critic"):
        check_roles(dataclasses.replace(GRPO, critic=True), None, None)
    check_roles(GRPO, None, None)


def test_results_are_means_maxima_and_sums() -> None:
    one = StepResult(
        step=1, loss=1.0, grad_norm=2.0, learning_rate=0.1, num_loss_tokens=3, num_tokens=5,
        metrics={"entropy": 1.0, "ratio_max": 4.0}, train_s=1.0,
    )  # fmt: skip
    other = dataclasses.replace(one, loss=3.0, grad_norm=1.0, metrics={"entropy": 2.0, "ratio_max": 2.0})
    both = merge_results([one, other])
    assert (both.loss, both.grad_norm, both.num_tokens, both.train_s) == (2.0, 2.0, 10, 2.0)
    assert both.metrics == {"entropy": 1.5, "ratio_max": 4.0, "updates": 2.0}
    assert merge_results([one]) is one
