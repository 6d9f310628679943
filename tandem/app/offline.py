"""A run that learns from data instead of rollouts: SFT, DPO and its kin, reward models.

Owns: the checks before it, the objects of it, and its exported model. Refuses: the folder and the exit code (``run``).
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tandem.algorithms.credit import demonstration, preference
from tandem.algorithms.spec import AlgorithmSpec, Data, resolve
from tandem.app.build import export_model, load_for_training, prepare_process
from tandem.app.preflight import ModelFiles, prepare_model
from tandem.app.ranks import TrainEngine, count_ranks, ranks_of, train_engine
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.core.events import DataLoaded
from tandem.core.protocols import EventSink
from tandem.core.types import Sample
from tandem.engine.compute import ComputeQueue
from tandem.engine.train.checkpoint import CheckpointStore
from tandem.engine.train.score import Scorer, frozen_copy
from tandem.engine.train.value import RewardModelEngine, ValueModel
from tandem.engine.weights import PublishedWeights
from tandem.envs.dataset import Loaded, Source, find_source, load_dataset, try_first_row
from tandem.models.lora import merged_copy
from tandem.models.saver import save_scoring_model
from tandem.trainer.supervised import SupervisedRun, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineReady:
    """What the checks have found: method, model files, and the rows as samples."""

    algorithm: AlgorithmSpec
    model: ModelFiles
    source: Source
    loaded: Loaded
    held_out: Loaded | None

    @property
    def is_reward(self) -> bool:
        return self.algorithm.loss.endswith(":bradley_terry")


def is_offline(recipe: Recipe) -> bool:
    """Whether the recipe's method learns from data."""
    return resolve(recipe.algorithm).data is not Data.EPISODES


def prepare_offline(recipe: Recipe) -> OfflineReady:
    """Check method, data and model folder; the weights are not read yet.

    Raises:
        ConfigError, PluginError, ModelError: what is wrong, and where.
    """
    algorithm = resolve(recipe.algorithm)
    if not recipe.data.path:
        raise ConfigError(
            f"{algorithm.name} learns from data, but data.path is empty",
            hint="set data.path to a .jsonl, .json, .csv, .parquet or .arrow file, a folder of such, or one on the hub",
        )
    pairs = algorithm.data is Data.PREFERENCES
    if algorithm.loss.endswith(":bradley_terry") and count_ranks(recipe) > 1:
        raise ConfigError("reward models train on one device", hint="set trainer.devices = 1")
    if recipe.reward_model.path:
        raise ConfigError(f"reward_model.path is set, but {algorithm.name} learns from data, not from rewards",
                          hint="leave it out")  # fmt: skip
    data = recipe.data
    has_eval = bool(data.eval_path or data.eval_split)
    if has_eval and pairs:
        raise ConfigError("data.eval_path measures the loss of demonstrations; pairs have none yet")
    source = find_source(data, data.path, data.split)
    held_out = find_source(data, data.eval_path or data.path, data.eval_split) if has_eval else None
    try_first_row(data, source)
    model = prepare_model(recipe)

    def load(source: Source) -> Loaded:
        return load_dataset(data, source, model.renderer, pairs=pairs, max_tokens=model.max_context_tokens)

    return OfflineReady(
        algorithm=algorithm,
        model=model,
        source=source,
        loaded=load(source),
        held_out=load(held_out) if held_out else None,
    )


async def train_offline(recipe: Recipe, ready: OfflineReady, folder: Path, sink: EventSink) -> Path:
    """Run all steps that are not done yet; returns the exported model folder."""
    loaded = ready.loaded
    sink.emit(
        DataLoaded(
            path=recipe.data.path,
            files=[str(file) for file in ready.source.files()],
            num_rows=loaded.num_rows,
            num_kept=len(loaded.streams),
            dropped=dict(loaded.dropped),
        )
    )
    prepare_process(recipe)
    compute = ComputeQueue()
    try:
        weights = PublishedWeights(load_for_training(recipe, ready.model.path))
        async with ranks_of(recipe) as ranks:
            if ready.is_reward:
                engine = RewardModelEngine(
                    ValueModel(weights.model),
                    compute,
                    train=recipe.engine.train,
                    optimizer=recipe.optimizer,
                    algorithm=ready.algorithm,
                    total_steps=recipe.trainer.steps,
                )
            else:
                steps = recipe.trainer.steps
                engine = await train_engine(
                    recipe, weights, compute, ranks, algorithm=ready.algorithm, total_steps=steps
                )
            return await _Offline(recipe, ready, folder, sink, compute, weights, engine).run()
    finally:
        compute.close()


class _Offline:
    def __init__(
        self,
        recipe: Recipe,
        ready: OfflineReady,
        folder: Path,
        sink: EventSink,
        compute: ComputeQueue,
        weights: PublishedWeights,
        engine: TrainEngine | RewardModelEngine,
    ) -> None:
        self._recipe, self._ready, self._folder, self._sink = recipe, ready, folder, sink
        self._weights, self._compute, self._engine = weights, compute, engine
        self._reference = frozen_copy(weights.model) if ready.algorithm.needs_reference else None
        self._store = CheckpointStore(
            folder / "checkpoints",
            self._weights,
            self._engine.optimizer,
            keep=recipe.trainer.keep_checkpoints,
            reference=self._reference,
        )

    async def run(self) -> Path:
        recipe, latest = self._recipe, self._store.latest()
        if latest is not None:
            await asyncio.to_thread(self._store.restore, latest)
        scorer = Scorer(self._reference, self._compute, recipe.engine.train) if self._reference else None
        await SupervisedRun(
            engine=self._engine,
            algorithm=self._ready.algorithm,
            train=recipe.engine.train,
            trainer=recipe.trainer,
            data=recipe.data,
            sink=self._sink,
            store=self._store,
            evaluate=self._evaluate,
            reference=scorer.score if scorer else None,
        ).run(_units(self._ready.loaded, pairs=self._ready.algorithm.data is Data.PREFERENCES), after=latest or 0)
        return self._export()

    async def _evaluate(self) -> dict[str, float]:
        """Mean loss of the held-out demonstrations' tokens."""
        if self._ready.held_out is None or isinstance(self._engine, RewardModelEngine):
            return {}
        samples = [sample for unit in _units(self._ready.held_out, pairs=False) for sample in unit]
        streams = await self._engine.score([sample.trajectory for sample in samples])
        total = sum(
            float(np.dot(np.array(sample.ce_weights), np.array(stream)))
            for sample, stream in zip(samples, streams, strict=True)
        )
        return {"eval_loss": -total / sum(sum(sample.ce_weights) for sample in samples)}

    def _export(self) -> Path:
        base = self._ready.model.path
        if not isinstance(self._engine, RewardModelEngine):
            return export_model(self._weights.model, self._folder, base=base)
        target, fresh = self._folder / "model", self._folder / ".model-new"
        shutil.rmtree(fresh, ignore_errors=True)
        head = self._engine.model.head.weight.detach()
        save_scoring_model(merged_copy(self._weights.model), head, fresh, tokenizer_from=base)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        return target


def _units(loaded: Loaded, *, pairs: bool) -> list[Unit]:
    units: list[Unit] = []
    for number, streams in enumerate(loaded.streams):
        made: list[Sample] = [demonstration(f"row-{number}", *stream) for stream in streams]
        units.append(preference(*made) if pairs else tuple(made))
    return units
