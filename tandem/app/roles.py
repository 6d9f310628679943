"""The models beside the one in training: reference or teacher, critic, and reward model.

Owns: which of them a method needs, and what they start from. Refuses: training them. Invariant: a reference has the
weights that reinforcement begins with, so make it before the first step (a resumed run puts its own into it).
"""

from __future__ import annotations

import torch

from tandem.algorithms.spec import AlgorithmSpec
from tandem.app.build import DTYPES, Parts
from tandem.app.preflight import pick_device
from tandem.config.tree import Recipe
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.score import Parking, Scorer, frozen_copy
from tandem.engine.train.value import AnswerScorer, CriticEngine, ValueModel
from tandem.models.builtin import resolve_model
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import load_model, load_scoring_model
from tandem.trainer.scoring import Judge, Score


def reference_of(parts: Parts, algorithm: AlgorithmSpec) -> CausalLM | None:
    """The frozen weights that a method compares with: its teacher, or the policy as it is now."""
    if algorithm.teacher:
        return teacher_of(parts.recipe)
    return frozen_copy(parts.weights.model) if algorithm.needs_reference else None


def score_of(parts: Parts, reference: CausalLM | None) -> Score | None:
    """How the reference is asked; it waits where ``engine.train.hand_over`` says."""
    if reference is None:
        return None
    train = parts.recipe.engine.train
    return Scorer(reference, parts.compute, train, parking=Parking(reference, parks=train.hand_over)).score


def critic_of(parts: Parts, algorithm: AlgorithmSpec) -> CriticEngine | None:
    """A value model that starts from the policy's weights."""
    if not algorithm.critic:
        return None
    return critic_engine(parts.recipe, frozen_copy(parts.weights.model).requires_grad_(True), parts.compute)


def critic_engine(recipe: Recipe, body: CausalLM, compute: ComputeQueue) -> CriticEngine:
    """The engine of a value model on ``body``, with the knobs of the recipe."""
    return CriticEngine(
        ValueModel(body),
        compute,
        train=recipe.engine.train,
        optimizer=recipe.optimizer.model_copy(update={"learning_rate": recipe.critic.learning_rate}),
        clip=recipe.critic.clip or None,
        total_steps=recipe.trainer.steps,
    )


def judge_of(parts: Parts) -> Judge | None:
    """The frozen reward model that a recipe names."""
    recipe = parts.recipe
    if not recipe.reward_model.path:
        return None
    body, head = load_scoring_model(
        resolve_model(recipe.reward_model.path),
        dtype=DTYPES[recipe.model.dtype],
        device=pick_device(recipe.model.device),
        numerics=recipe.engine.numerics,
    )
    model = ValueModel(body)
    with torch.no_grad():
        model.head.weight.copy_(head)
    parking = Parking(model.requires_grad_(False), parks=recipe.engine.train.hand_over)
    scorer = AnswerScorer(model, parts.compute, recipe.engine.train, parking)
    return Judge(scorer.scores, recipe.reward_model.weight)


def teacher_of(recipe: Recipe) -> CausalLM:
    """The frozen model that a student learns from."""
    teacher = load_model(
        resolve_model(recipe.algorithm.teacher),
        dtype=DTYPES[recipe.model.dtype],
        device=pick_device(recipe.model.device),
        numerics=recipe.engine.numerics,
    )
    return teacher.requires_grad_(False)
