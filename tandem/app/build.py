"""From a recipe to the objects of a run, joined.

Owns: construction and the order of closing. Nothing outside this file knows which classes stand behind the seams.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.app.preflight import ModelFiles, Ready, pick_device
from tandem.config.tree import Recipe
from tandem.core.protocols import EventSink
from tandem.core.types import WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.memory import keep_freed_memory
from tandem.engine.weights import PublishedWeights
from tandem.models.loader import load_model
from tandem.rollout.driver import RolloutDriver
from tandem.sandbox.manager import SandboxManager, spec_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The running parts of a process that makes episodes; training adds its engine to them."""

    recipe: Recipe
    ready: Ready
    weights: PublishedWeights
    compute: ComputeQueue
    engine: InferEngine
    rollout: RolloutDriver

    async def load(self, version: WeightVersion) -> None:
        """Hand new weights on: to inference first, so that no group starts under weights that are not served."""
        await self.engine.load(version)
        self.rollout.advance(version)


def prepare_process(recipe: Recipe) -> None:
    """Fix the number of CPU threads of model computation, and what becomes of freed memory, for the life of the
    process; call it before a model is loaded."""
    keep_freed_memory()
    torch.set_num_threads(recipe.engine.threads or len(os.sched_getaffinity(0)))


def load_weights(recipe: Recipe, files: ModelFiles) -> PublishedWeights:
    """Load the model that the checks found."""
    model = load_model(
        files.path,
        dtype=DTYPES[recipe.model.dtype],
        device=pick_device(recipe.model.device),
        numerics=recipe.engine.numerics,
    )
    return PublishedWeights(model)


def make_engine(recipe: Recipe, files: ModelFiles, weights: PublishedWeights, compute: ComputeQueue) -> InferEngine:
    """The inference engine on the live weights."""
    return InferEngine(
        weights.model,
        weights,
        recipe.engine,
        compute,
        max_context_tokens=files.max_context_tokens,
        eos_ids=files.spec.eos_ids,
    )


@asynccontextmanager
async def parts_of(recipe: Recipe, ready: Ready, sink: EventSink) -> AsyncIterator[Parts]:
    """Build everything that episodes need, and take it down again in the opposite order whatever happens."""
    prepare_process(recipe)
    boxes = SandboxManager(recipe.sandbox, sink)
    compute = ComputeQueue()
    try:
        weights = load_weights(recipe, ready.model)
        engine = make_engine(recipe, ready.model, weights, compute)
        try:
            rollout = RolloutDriver(
                environment=ready.environment,
                engine=engine,
                renderer=ready.model.renderer,
                sandboxes=boxes,
                sandbox_spec=spec_of(recipe.sandbox),
                sink=sink,
                section=recipe.rollout,
                max_context_tokens=ready.model.max_context_tokens,
                seed=recipe.trainer.seed,
                in_order=recipe.trainer.deterministic,
            )
            async with rollout:
                yield Parts(
                    recipe=recipe, ready=ready, weights=weights, compute=compute, engine=engine, rollout=rollout
                )
        finally:
            await engine.close()
    finally:
        await boxes.close()
        compute.close()


def label_of(recipe: Recipe) -> str:
    """What folders made from the recipe begin with: its environment's short name."""
    return Path(recipe.environment.name.split(":")[0]).stem
