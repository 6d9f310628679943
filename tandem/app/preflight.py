"""Everything that can be wrong, found before any model is loaded.

Owns: the order of the checks. Each raises one clear error; the first one ends the command.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.core.types import Message
from tandem.envs.environment import Environment, check_environment, demonstration, load_environment
from tandem.models.builtin import resolve_model
from tandem.models.loader import read_spec
from tandem.models.spec import ModelSpec
from tandem.record.sinks.nowhere import NowhereSink
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
    """Check recipe, environment, model folder and sandbox; ``model_path`` overrides the recipe's model. Runs an event
    loop of its own: call it from a thread that has none.

    Raises:
        ConfigError, PluginError, ModelError, SandboxUnavailable: what is wrong, where, and the nearest valid value.
    """
    environment = load_environment(recipe.environment)
    check_environment(environment)
    if recipe.warmup.steps and environment.demonstrate is None:
        raise ConfigError(
            f"warmup.steps is {recipe.warmup.steps}, but environment {environment.name!r} has no demonstrations",
            hint="set warmup.steps = 0, or give the environment demonstrate=...",
        )
    model = prepare_model(recipe, model_path=model_path)
    _check_prompt(environment, model)
    asyncio.run(_check_boxes(recipe, environment))
    return Ready(environment=environment, model=model)


def prepare_model(recipe: Recipe, *, model_path: Path | None = None) -> ModelFiles:
    """Check the model alone: what serving needs.

    Raises:
        ModelError: it is missing, or no model that is known here.
    """
    folder = model_path or resolve_model(recipe.model.path)
    spec = read_spec(folder)
    return ModelFiles(
        path=folder,
        spec=spec,
        renderer=Renderer(load_tokenizer(folder), recipe.model.tool_format),
        max_context_tokens=min(recipe.model.max_context_tokens, spec.max_positions),
    )


async def _check_boxes(recipe: Recipe, environment: Environment) -> None:
    boxes = SandboxManager(recipe.sandbox, NowhereSink())
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


def demonstrations(environment: Environment, count: int, seed: int) -> list[tuple[Message, ...]]:
    """Finished conversations for the first ``count`` training tasks of a seed of their own."""
    made = (demonstration(environment, environment.task(seed, index)) for index in range(count))
    return [messages for messages in made if messages is not None]
