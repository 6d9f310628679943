"""From a recipe to the objects of a run, joined.

Owns: construction and the order of closing. Nothing outside this file knows which classes stand behind the seams.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.app.foreign import vllm_program
from tandem.app.gateway import AgentGateway
from tandem.app.preflight import ModelFiles, Ready, pick_device
from tandem.config.tree import Recipe
from tandem.core.errors import RecordError, writing
from tandem.core.events import EvaluationFinished
from tandem.core.protocols import EventSink, TokenEngine
from tandem.core.types import WeightVersion
from tandem.engine.compute import ComputeQueue
from tandem.engine.infer.loop import InferEngine
from tandem.engine.memory import keep_freed_memory, return_freed_memory
from tandem.engine.process.client import ProcessEngine, ending_with
from tandem.engine.process.program import Program
from tandem.engine.weights import PublishedWeights
from tandem.kernels.self_check import prove_whole
from tandem.models.causal_lm import CausalLM
from tandem.models.loader import load_model, read_spec
from tandem.models.lora import (
    LoraSpec,
    adapters_of,
    add_adapters,
    load_adapters,
    merged_copy,
    read_adapter_spec,
    save_adapters,
)
from tandem.models.proof import proven
from tandem.models.saver import save_model
from tandem.rollout.driver import RolloutDriver
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.manager import SandboxManager, spec_of
from tandem.trainer.evaluate import summarise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The running parts of a process that makes episodes; training adds its engine to them."""

    recipe: Recipe
    ready: Ready
    weights: PublishedWeights
    compute: ComputeQueue
    engine: TokenEngine
    rollout: RolloutDriver

    async def load(self, version: WeightVersion) -> None:
        """Hand new weights on: to inference first, so that no group starts under weights that are not live."""
        await self.engine.load(version)
        self.rollout.advance(version)

    async def evaluate(self, name: str, step: int) -> EvaluationFinished | None:
        """The live weights on the held-out tasks; None where there are none. ``name`` must be new in the run."""
        started = time.perf_counter()
        section = self.recipe.environment
        tasks = self.ready.environment.held_out(section.num_eval_tasks)
        if not tasks:
            return None
        version = WeightVersion(number=self.weights.version, step=step)
        await self.engine.load(version)
        episodes = await self.rollout.evaluate(
            tasks, name=name, version=version, temperature=section.eval_temperature
        )
        duration_s = time.perf_counter() - started
        return summarise(episodes, tasks, name=name, step=step, duration_s=duration_s)


def prepare_process(recipe: Recipe) -> None:
    """Fix the number of CPU threads of model computation, and what becomes of freed memory, for the life of the
    process; call it before a model is loaded."""
    keep_freed_memory()
    torch.set_num_threads(recipe.engine.threads or len(os.sched_getaffinity(0)))


def load_for_training(recipe: Recipe, path: Path) -> CausalLM:
    """The weights that the recipe starts from, with the adapters it asks for."""
    dtype, device = DTYPES[recipe.model.dtype], pick_device(recipe.model.device)
    numerics = proven(recipe.engine.numerics, dtype, device, read_spec(path))
    model = load_model(path, dtype=dtype, device=device, numerics=numerics)
    return with_adapters(model, recipe)


def with_adapters(model: CausalLM, recipe: Recipe) -> CausalLM:
    """The model with the adapters that the recipe asks for."""
    if recipe.lora.path:
        return load_adapters(model, Path(recipe.lora.path))
    spec = lora_of(recipe)
    return model if spec is None else add_adapters(model, spec, seed=recipe.trainer.seed)


def quantise(model: CausalLM, *, is_alone: bool) -> None:
    """Serve a model in whole numbers of 8 bits.

    Raises:
        ModelError: it cannot be. EngineError: a row's bits depend on its batch here.
    """
    model.quantise(is_alone=is_alone)
    prove_whole(model.ops)
    if is_alone:
        return_freed_memory()


def is_apart(recipe: Recipe) -> bool:
    """Whether the engine has a process of its own."""
    return recipe.engine.process or recipe.engine.name != "tandem"


def samples_exactly(recipe: Recipe, model: CausalLM) -> bool:
    """Whether the log-probabilities of sampler and trainer are meant to be the same bits."""
    return recipe.engine.name == "tandem" and recipe.engine.quantize == "none" and model.ops.numerics == "exact"


def lora_of(recipe: Recipe) -> LoraSpec | None:
    """The adapters that a recipe trains."""
    lora = recipe.lora
    if lora.path:
        return read_adapter_spec(Path(lora.path))
    if not lora.rank:
        return None
    return LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dora=lora.dora)


def export_model(model: CausalLM, folder: Path, *, base: Path) -> Path:
    """Write the weights, adapters merged, as ``model`` in a run folder, and adapters alone as ``adapter``; newer ones
    replace what is there."""
    target, fresh = folder / "model", folder / ".model-new"
    shutil.rmtree(fresh, ignore_errors=True)
    whole = merged_copy(model) if adapters_of(model) else model
    with writing(folder, RecordError, hint="make room, then resume the run"):
        save_model(whole, fresh, tokenizer_from=base)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        if whole is not model:
            shutil.rmtree(folder / "adapter", ignore_errors=True)
            save_adapters(model, folder / "adapter", base=str(base))
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """Weights and the inference engine on them."""

    weights: PublishedWeights
    compute: ComputeQueue
    engine: TokenEngine


@asynccontextmanager
async def engine_of(recipe: Recipe, files: ModelFiles, *, is_alone: bool = False) -> AsyncIterator[LiveModel]:
    """Load the model that the checks found, and serve its live weights; taken down in the opposite order.
    ``is_alone``: nobody but the engine reads them, so they are kept in its own layout only."""
    prepare_process(recipe)
    compute = ComputeQueue()
    try:
        model = load_for_training(recipe, files.path)
        if not is_apart(recipe):
            if recipe.engine.quantize == "int8":
                quantise(model, is_alone=is_alone)
            elif is_alone:
                model.hold_packed()
        weights = PublishedWeights(model)
        async with _engine_on(recipe, files, weights, compute) as engine:
            yield LiveModel(weights=weights, compute=compute, engine=engine)
    finally:
        compute.close()


@asynccontextmanager
async def _engine_on(
    recipe: Recipe, files: ModelFiles, weights: PublishedWeights, compute: ComputeQueue
) -> AsyncIterator[TokenEngine]:
    if is_apart(recipe):
        make = _program if recipe.engine.name == "tandem" else vllm_program
        program = make(recipe, files, numerics=weights.model.ops.numerics)
        apart = await ProcessEngine.started(program, weights, compute)
        try:
            async with ending_with(apart):
                yield apart
        finally:
            await apart.close()
        return
    engine = InferEngine(
        weights.model,
        weights,
        recipe.engine,
        compute,
        max_context_tokens=files.max_context_tokens,
        eos_ids=files.spec.eos_ids,
    )
    try:
        yield engine
    finally:
        await engine.close()


def _program(recipe: Recipe, files: ModelFiles, *, numerics: str) -> Program:
    """The engine of a recipe in a process of its own, whose self-check chose ``numerics``."""
    settings = {
        "recipe": recipe.model_dump(mode="json"),
        "path": str(files.path),
        "numerics": numerics,
        "max_context_tokens": files.max_context_tokens,
    }
    return Program(
        command=(sys.executable, "-m", "tandem.app.engine_process"),
        settings=json.dumps(settings),
        transport=recipe.engine.transport,
        # Adapters read the weights they change, and whole numbers are made of those that come.
        takes_packed=not recipe.lora.rank and not recipe.lora.path and recipe.engine.quantize == "none",
    )


@asynccontextmanager
async def parts_of(recipe: Recipe, ready: Ready, sink: EventSink) -> AsyncIterator[Parts]:
    """Build everything that episodes need, and take it down again in the opposite order whatever happens."""
    async with engine_of(recipe, ready.model) as live:
        boxes = SandboxManager(recipe.sandbox, sink, templates=ImageLibrary())
        gateway = AgentGateway(
            live.engine, ready.model.renderer, max_context_tokens=ready.model.max_context_tokens
        )
        try:
            rollout = RolloutDriver(
                environment=ready.environment,
                engine=live.engine,
                renderer=ready.model.renderer,
                sandboxes=boxes,
                sandbox_spec=spec_of(recipe.sandbox),
                sink=sink,
                section=recipe.rollout,
                max_context_tokens=ready.model.max_context_tokens,
                seed=recipe.trainer.seed,
                in_order=recipe.trainer.deterministic,
                gateway=gateway,
            )
            async with rollout:
                yield Parts(
                    recipe=recipe,
                    ready=ready,
                    weights=live.weights,
                    compute=live.compute,
                    engine=live.engine,
                    rollout=rollout,
                )
        finally:
            await gateway.close()
            await boxes.close()


def label_of(recipe: Recipe) -> str:
    """What folders made from the recipe begin with: the short name of its data or environment."""
    if recipe.data.path:
        return f"{recipe.algorithm.name}-{Path(recipe.data.path).stem}"
    return Path(recipe.environment.name.split(":")[0]).stem
