"""Methods by name, and the section's knobs."""

from __future__ import annotations

import pytest

from tandem.algorithms.spec import Aggregate, algorithms, function_named, resolve
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.core.errors import ConfigError, PluginError


def test_every_record_is_named_as_it_is_registered_and_its_functions_load() -> None:
    for name in algorithms().names():
        spec = resolve(AlgorithmSection(name=name, teacher="tiny" if name == "distil" else ""))
        assert spec.source, name
        assert spec.name == name
        assert callable(function_named(spec.loss))
        assert spec.credit is None or callable(function_named(spec.credit))


def test_the_section_adjusts_the_record() -> None:
    spec = resolve(AlgorithmSection(name="dapo", clip_high=0.5, kl_weight=0.01))
    assert (spec.clip_low, spec.clip_high, spec.kl_weight, spec.needs_reference) == (0.2, 0.5, 0.01, True)
    assert resolve(AlgorithmSection(name="dr_grpo", length_cap=99)).length_cap == 99
    assert resolve(AlgorithmSection(name="grpo")).aggregate is Aggregate.SEQUENCE_MEAN


def test_a_near_name_is_offered() -> None:
    with pytest.raises(PluginError) as caught:
        resolve(AlgorithmSection(name="grop"))
    assert "grpo" in caught.value.hint


@pytest.mark.parametrize(
    "section",
    [
        AlgorithmSection(name="rloo", clip_low=0.1),
        AlgorithmSection(name="sft", kl_weight=0.1),
        AlgorithmSection(name="grpo", kl_weight=0.1, kl_reward_weight=0.1),
        AlgorithmSection(name="grpo", kl_weight=0.1, kl_estimator="k1"),
        AlgorithmSection(name="grpo", kl_estimator="k2"),
        AlgorithmSection(name="grpo", importance_cap=3.0),
        AlgorithmSection(name="grpo", decay=0.9),
        AlgorithmSection(name="grpo", beta=0.2),
        AlgorithmSection(name="cispo", clip_low=0.2),
        AlgorithmSection(name="rloo", passes=2),
        AlgorithmSection(name="ipo", label_smoothing=0.1),
        AlgorithmSection(name="distil"),
        AlgorithmSection(name="grpo", teacher="tiny"),
        AlgorithmSection(name="dapo", overlong_cap=4, overlong_buffer=5),
        AlgorithmSection(name="tandem.algorithms.advantages:centred"),
    ],
)
def test_a_knob_that_does_not_apply_is_refused(section) -> None:
    with pytest.raises(ConfigError):
        resolve(section)
