"""Everything that can be wrong, found before any model is loaded.

Owns: the order of the checks. Each raises one clear error; the first one ends the command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.algorithms.spec import resolve
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.core.types import Message
from tandem.envs.environment import Environment, check_environment, demonstration, load_environment
from tandem.models.builtin import resolve_model
from tandem.models.loader import read_spec
from tandem.models.spec import ModelSpec
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.manager import SandboxManager, spec_of
from tandem.text.render import Renderer
from tandem.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that can be loaded: its folder, what it is, how it writes, and how long a context it may have."""

    path: Path
    spec: ModelSpec
    renderer: Renderer
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the checks have found and made on the way."""

    environment: Environment
    model: ModelFiles


def prepare(recipe: Recipe, *, model_path: Path | None = None) -> Ready:
    """Check method, environment, model folder and sandbox; ``model_path`` overrides the recipe's model. Runs an event
    loop of its own: call it from a thread that has none.

    Raises:
        ConfigError, PluginError, ModelError, SandboxUnavailable: what is wrong, where, and the nearest valid value.
    """
    resolve(recipe.algorithm)
    spec_of(recipe.sandbox)
    environment = load_environment(recipe.environment)
    check_environment(environment)
    if recipe.warmup.steps and environment.demonstrate is None:
        raise ConfigError(
            f"warmup.steps is {recipe.warmup.steps}, but environment {environment.name!r} has no demonstrations",
            hint="set warmup.steps = 0, or give the environment demonstrate=...",
        )
    model = prepare_model(recipe, model_path=model_path)
    _check_beside(recipe, model.spec)
    _check_prompt(environment, model)
    asyncio.run(_check_boxes(recipe, environment))
    return Ready(environment=environment, model=model)


def prepare_model(recipe: Recipe, *, model_path: Path | None = None) -> ModelFiles:
    """Check the model alone: what serving needs.

    Raises:
        ModelError: it is missing, or no model that is known here.
        ConfigError: there is no such device, or the KV cache cannot hold one context.
    """
    pick_device(recipe.model.device)
    folder = model_path or resolve_model(recipe.model.path)
    spec = read_spec(folder)
    _check_quantised(recipe, spec)
    max_context_tokens = min(recipe.model.max_context_tokens, spec.max_positions)
    infer = recipe.engine.infer
    if infer.kv_tokens // infer.block_size * infer.block_size < max_context_tokens:
        raise ConfigError(
            f"engine.infer.kv_tokens is {infer.kv_tokens} (in blocks of {infer.block_size}): less than one context of "
            f"{max_context_tokens} tokens",
            hint=f"set it to {16 * max_context_tokens}, say, or lower model.max_context_tokens",
        )
    return ModelFiles(
        path=folder,
        spec=spec,
        renderer=Renderer(load_tokenizer(folder), recipe.model.tool_format, recipe.model.reasoning),
        max_context_tokens=max_context_tokens,
    )


def _check_quantised(recipe: Recipe, spec: ModelSpec) -> None:
    """Raises:
        ConfigError: ``engine.quantize`` on what cannot be served in 8 bits (the machine itself is asked at the load).
    """
    if recipe.engine.quantize == "none":
        return
    for fails, why, remedy in (
        (recipe.model.dtype != "bfloat16", f"model.dtype = {recipe.model.dtype}", 'model.dtype = "bfloat16"'),
        (bool(recipe.lora.rank or recipe.lora.path), "adapters", "lora.rank = 0 and no lora.path"),
        (spec.experts is not None, "a model of experts", "a dense model"),
        (recipe.engine.numerics != "exact", "other numerics than exact", 'engine.numerics = "exact"'),
        (pick_device(recipe.model.device).type != "cpu", "another device than the CPU", 'model.device = "cpu"'),
    ):
        if fails:
            raise ConfigError(
                f"engine.quantize is {recipe.engine.quantize}, which does not go with {why}",
                hint=f'{remedy}, or engine.quantize = "none"',
            )


def pick_device(name: str) -> torch.device:
    """``auto`` is the accelerator where there is one.

    Raises:
        ConfigError: PyTorch knows no such device, or this machine has none.
    """
    accelerator = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if accelerator else "cpu")
    hint = "set model.device to auto, cpu or cuda"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device is {name!r}: PyTorch knows no such device", hint=hint) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {name!r}: models run on cpu or cuda", hint=hint)
    if device.type == "cuda" and (not accelerator or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"model.device is {name!r}, but PyTorch {torch.__version__} sees {torch.cuda.device_count()} such devices "
            "on this machine", hint="set model.device = \"auto\"; tandem doctor shows what there is",
        )  # fmt: skip
    return device


def _check_beside(recipe: Recipe, spec: ModelSpec) -> None:
    """Models beside the one in training read its tokens.

    Raises:
        ConfigError: another vocabulary, or a role that the method has no place for. ModelError: no such model.
    """
    beside = {"algorithm.teacher": recipe.algorithm.teacher, "reward_model.path": recipe.reward_model.path}
    if all(beside.values()):
        raise ConfigError(f"reward_model.path is set, but {recipe.algorithm.name} has no rewards",
                          hint="leave it out, or choose another algorithm.name")  # fmt: skip
    for option, path in beside.items():
        if not path:
            continue
        size = read_spec(resolve_model(path), scoring=option == "reward_model.path").vocab_size
        if size != spec.vocab_size:
            raise ConfigError(
                f"{option} has a vocabulary of {size} tokens, the model one of {spec.vocab_size}",
                hint="they need one tokenizer: choose models of one family",
            )


async def _check_boxes(recipe: Recipe, environment: Environment) -> None:
    boxes = SandboxManager(recipe.sandbox, NowhereSink(), templates=ImageLibrary())
    spec = spec_of(recipe.sandbox)
    try:
        await boxes.check(replace(spec, template=environment.template or spec.template))
    finally:
        await boxes.close()


def _check_prompt(environment: Environment, model: ModelFiles) -> None:
    """The first task must fit: a recipe whose context cannot hold its own prompts is wrong as a whole."""
    task = environment.task(0, 0)
    tools = [tool.spec for tool in environment.workflow.tools]
    length, limit = len(model.renderer.prompt(task.messages, tools)), model.max_context_tokens
    if length >= limit:
        raise ConfigError(
            f"task {task.id!r} of environment {environment.name!r} has a prompt of {length} tokens; "
            f"model.max_context_tokens is {limit}",
            hint=f"set model.max_context_tokens above {length} plus the answers, or shorten the task",
        )


def demonstrations(environment: Environment, count: int, seed: int) -> Iterator[tuple[Message, ...]]:
    """Finished conversations for the first ``count`` training tasks of a seed of their own, made one by one."""
    made = (demonstration(environment, environment.task(seed, index)) for index in range(count))
    return (messages for messages in made if messages is not None)
