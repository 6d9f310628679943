"""How many processes train a recipe, and the train engine that fits.

Owns: the choice between one process, which trains the very tensors that it samples from, and one for each device.
Refuses: what the ranks do. Invariant: sampling, scoring by other models and the critic stay with rank 0.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from tandem.algorithms.spec import AlgorithmSpec
from tandem.app.build import lora_of
from tandem.app.preflight import pick_device
from tandem.config.sections.optimizer import OptimizerSection
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.parallel import Setup
from tandem.engine.train.ranked import RankedTrainEngine
from tandem.engine.train.ranks import RankGroup
from tandem.engine.train.step import LocalTrainEngine
from tandem.engine.weights import PublishedWeights

TrainEngine = LocalTrainEngine | RankedTrainEngine


def count_ranks(recipe: Recipe) -> int:
    """The processes that train: ``trainer.devices``, or every GPU, or one on a CPU.

    Raises:
        ConfigError: the machine has fewer GPUs than the recipe asks for.
    """
    wanted = recipe.trainer.devices
    if not str(pick_device(recipe.model.device)).startswith("cuda"):
        return wanted or 1
    found = torch.cuda.device_count()
    if wanted > found:
        raise ConfigError(f"trainer.devices is {wanted}, this machine has {found} GPUs", hint="0 uses all there are")
    return wanted or found


@asynccontextmanager
async def ranks_of(recipe: Recipe) -> AsyncIterator[RankGroup | None]:
    """The other processes of a run, ended with it; None where one process trains alone."""
    count = count_ranks(recipe)
    if count == 1:
        yield None
        return
    group = RankGroup(
        count,
        device=str(pick_device(recipe.model.device)).split(":")[0],
        threads=recipe.engine.threads or max(1, len(os.sched_getaffinity(0)) // count),
        timeout_s=recipe.trainer.rank_timeout_s,
    )
    try:
        await asyncio.to_thread(group.start)
        yield group
    finally:
        group.close()


async def train_engine(
    recipe: Recipe,
    weights: PublishedWeights,
    compute: ComputeQueue,
    ranks: RankGroup | None,
    *,
    algorithm: AlgorithmSpec,
    total_steps: int,
    optimizer: OptimizerSection | None = None,
) -> TrainEngine:
    """The engine that trains the published weights, with the recipe's optimizer or another."""
    section = optimizer or recipe.optimizer
    if ranks is None:
        return LocalTrainEngine(
            weights, compute, train=recipe.engine.train, optimizer=section, algorithm=algorithm, total_steps=total_steps
        )
    model = weights.model
    setup = Setup(
        spec=model.spec,
        lora=lora_of(recipe),
        dtype=model.dtype,
        numerics=model.ops.numerics,
        train=recipe.engine.train,
        optimizer=section,
        algorithm=algorithm,
    )
    return await RankedTrainEngine.open(weights, compute, ranks, setup=setup, total_steps=total_steps)
