"""Checks that cross sections."""

import pytest
from pydantic import ValidationError

from tandem.config.tree import Recipe


def test_truncated_support_is_for_evaluation_only():
    assert Recipe.model_validate({"rollout": {"top_k": 5}, "trainer": {"steps": 0}}).rollout.top_k == 5
    with pytest.raises(ValidationError, match="full-support"):
        Recipe.model_validate({"rollout": {"top_k": 5}, "trainer": {"steps": 1}})


def test_a_recipe_is_frozen_and_refuses_infinities():
    with pytest.raises(ValidationError, match="frozen"):
        Recipe().trainer.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="finite"):
        Recipe.model_validate({"optimizer": {"learning_rate": float("inf")}})
