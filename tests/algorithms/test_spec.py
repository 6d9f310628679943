"""Methods by name, and the section's knobs."""

from __future__ import annotations

import pytest

from tandem.algorithms.spec import BUILTIN, Aggregate, AlgorithmSpec, algorithms, function_named, resolve
from tandem.config.sections.algorithm import AlgorithmSection
from tandem.core.errors import ConfigError, PluginError


def test_every_record_is_named_as_it_is_registered_and_its_functions_load() -> None:
    for name in algorithms().names():
        spec = resolve(AlgorithmSection(name=name, teacher="tiny" if name == "distil" else ""))
        assert spec.source and spec.formula, name
        assert spec.name == name
        assert callable(function_named(spec.loss))
        assert spec.credit is None or callable(function_named(spec.credit))


def test_the_section_adjusts_the_record() -> None:
    spec = resolve(AlgorithmSection(name="dapo", clip_high=0.5, kl_weight=0.01))
    assert (spec.clip_low, spec.clip_high, spec.kl_weight, spec.needs_reference) == (0.2, 0.5, 0.01, True)
    assert resolve(AlgorithmSection(name="dr_grpo", length_cap=99)).length_cap == 99
    assert resolve(AlgorithmSection(name="grpo")).aggregate is Aggregate.SEQUENCE_MEAN


# What the papers have, read from them or from their authors' code.
PAPERS: dict[str, dict[str, object]] = {
    "sft": {},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "kl_estimator": "k3", "kl_weight": 0.04},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.0, "length_cap": 3000},
    "dapo": {
        "clip_low": 0.2, "clip_high": 0.28, "overlong_cap": 20480, "overlong_buffer": 4096, "kl_weight": 0.0,
    },
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "kl_weight": 0.0},
    "rloo": {"kl_reward_weight": 0.03},
    "cispo": {"clip_low": None, "clip_high": 4.0, "kl_weight": 0.0},
    "reinforce_pp": {"clip_low": 0.2, "clip_high": 0.2, "whiten": True, "kl_reward_weight": 1e-4},
    "reinforce_pp_baseline": {
        "clip_low": 0.2, "clip_high": 0.2, "whiten": True, "kl_estimator": "k2", "kl_weight": 1e-4,
    },
    "ppo": {
        "clip_low": 0.2, "clip_high": 0.2, "decay": 0.95, "discount": 1.0, "passes": 1, "kl_reward_weight": 0.02,
    },
    "distil": {"discount": 1.0, "kl_weight": 0.0},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "cdpo": {"beta": 0.1, "label_smoothing": 0.1},
    "ipo": {"beta": 0.1},
    "reward": {"label_smoothing": 0.0},
}  # fmt: skip


def test_each_default_is_the_papers() -> None:
    assert set(PAPERS) == set(BUILTIN)
    neutral = AlgorithmSpec(name="", summary="", credit=None, aggregate=Aggregate.TOKEN_MEAN)
    for name, papers in PAPERS.items():
        spec = algorithms().resolve(name)
        assert isinstance(spec, AlgorithmSpec)
        told = {default.knob for default in spec.defaults}
        assert {knob: getattr(spec, knob) for knob in told} == papers, name
        assert all(default.where for default in spec.defaults), name
        for knob in AlgorithmSection.model_fields.keys() - {"name", "teacher"}:
            assert knob in told or getattr(spec, knob) == getattr(neutral, knob), (name, knob)


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
        AlgorithmSection(name="dr_grpo", kl_estimator="k2"),
        AlgorithmSection(name="grpo", kl_reward_weight=0.1),
        AlgorithmSection(name="grpo", length_cap=99),
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
