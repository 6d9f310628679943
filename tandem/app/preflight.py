"""Everything that can be wrong, found before any model is loaded.

Owns: the order of the checks. Each raises one clear error; the first one ends the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.core.types import Message
from tandem.envs.environment import Environment, check_environment, demonstration, load_environment
from tandem.models.builtin import resolve_model
from tandem.models.loader import read_spec
from tandem.models.spec import ModelSpec
from tandem.text.render import Renderer
from tandem.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the checks have found and made on the way."""

    environment: Environment
    model_path: Path
    spec: ModelSpec
    renderer: Renderer
    max_context_tokens: int


def prepare(recipe: Recipe, *, model_path: Path | None = None) -> Ready:
    """Check recipe, environment and model folder; ``model_path`` overrides the recipe's model.

    Raises:
        ConfigError, PluginError, ModelError: what is wrong, where, and the nearest valid value.
    """
    environment = load_environment(recipe.environment)
    check_environment(environment)
    if recipe.warmup.steps and environment.demonstrate is None:
        raise ConfigError(
            f"warmup.steps is {recipe.warmup.steps}, but environment {environment.name!r} has no demonstrations",
            hint="set warmup.steps = 0, or give the environment demonstrate=...",
        )
    folder = model_path or resolve_model(recipe.model.path)
    spec = read_spec(folder)
    renderer = Renderer(load_tokenizer(folder), recipe.model.tool_format)
    limit = min(recipe.model.max_context_tokens, spec.max_positions)
    _check_prompt(environment, renderer, limit)
    return Ready(
        environment=environment, model_path=folder, spec=spec, renderer=renderer, max_context_tokens=limit
    )


def _check_prompt(environment: Environment, renderer: Renderer, limit: int) -> None:
    """The first task must fit: a recipe whose context cannot hold its own prompts is wrong as a whole."""
    task = environment.task(0, 0)
    tools = [tool.spec for tool in environment.workflow.tools]
    length = len(renderer.prompt(task.messages, tools))
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
