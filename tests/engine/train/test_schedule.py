"""The rate of each step; worked value W9."""

from __future__ import annotations

import pytest

from tandem.config.sections.optimizer import OptimizerSection
from tandem.engine.train.schedule import learning_rate


def test_w9_the_sixth_of_ten_warm_up_steps() -> None:
    section = OptimizerSection(learning_rate=1e-5, warmup_steps=10)
    assert learning_rate(section, step=6, total_steps=100) == pytest.approx(6e-6, rel=1e-12)
    assert learning_rate(section, step=10, total_steps=100) == pytest.approx(1e-5, rel=1e-12)
    assert learning_rate(section, step=99, total_steps=100) == pytest.approx(1e-5, rel=1e-12)


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_ends_at_its_floor(decay, middle) -> None:
    section = OptimizerSection(learning_rate=1.0, warmup_steps=2, decay=decay, min_ratio=0.1)
    assert learning_rate(section, step=2, total_steps=12) == 1.0
    assert learning_rate(section, step=7, total_steps=12) == pytest.approx(middle)
    assert learning_rate(section, step=12, total_steps=12) == pytest.approx(0.1)
    assert learning_rate(section, step=40, total_steps=12) == pytest.approx(0.1)


def test_no_warm_up_and_no_step_zero() -> None:
    assert learning_rate(OptimizerSection(learning_rate=3.0, warmup_steps=0), step=1, total_steps=1) == 3.0
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(OptimizerSection(), step=0, total_steps=1)
