"""An environment: tasks, agent loop, rewards and the box they need, in one frozen bundle.

Owns: the bundle, how it is found by name, and the trial that every hook gets before any model is loaded.
Refuses: running episodes (``rollout`` does). Errors name the user's file and line.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.config.sections.environment import EnvironmentSection
from tandem.core.errors import ConfigError, PluginError, TandemError
from tandem.core.registry import Registry
from tandem.core.types import Message, Role, Task
from tandem.envs.foreign import describe, place_of
from tandem.envs.reward import Reward, check_rewards
from tandem.envs.taskset import Taskset
from tandem.envs.workflow import Workflow

BUILTIN = {
    "boxwork": "tandem.envs.builtin.boxwork:environment",
    "chores": "tandem.envs.builtin.chores:environment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What an agent learns to do.

    ``template`` names what boxes are made from: empty is the recipe's ``sandbox.template``, None means that the
    episodes need no box. ``demonstrate(task)`` gives the messages that a good episode adds to the task's own
    (assistant, tool, ..., ending with an assistant's); it feeds the supervised warm-up.
    """

    tasks: Taskset
    workflow: Workflow
    rewards: Sequence[Reward]
    eval_tasks: Taskset | None = None
    template: str | None = ""
    demonstrate: Callable[[Task], Sequence[Message]] | None = None
    name: str = ""

    def task(self, seed: int, index: int) -> Task:
        """Training task number ``index``.

        Raises:
            PluginError: the taskset raised or gave no ``Task``; names file and line.
        """
        return _made(self.tasks, seed, index, f"task {index} of environment {self.name!r}")

    def held_out(self, count: int) -> list[Task]:
        """The first ``count`` evaluation tasks: the same ones for every run."""
        if self.eval_tasks is None:
            return []
        size = self.eval_tasks.size
        where = f"evaluation task {{}} of environment {self.name!r}"
        num_tasks = count if size is None else min(count, size)
        return [_made(self.eval_tasks, 0, index, where.format(index)) for index in range(num_tasks)]


def registry() -> Registry:
    """Environments by short name."""
    return Registry("environment", BUILTIN)


def load_environment(section: EnvironmentSection) -> Environment:
    """Find and make the environment that the section names.

    The name's object is an ``Environment``, or a function of the section's options that returns one.

    Raises:
        PluginError: it does not load or is no environment; the message names file and line.
        ConfigError: an option that its function does not take.
    """
    name = section.name
    try:
        found = registry().resolve(name)
        made = _call_factory(found, section) if inspect.isfunction(found) else found
    except TandemError as error:
        cause = error.__cause__
        if cause is None or place_of(cause) in error.message:
            raise
        raise type(error)(f"{error.message} ({place_of(cause)})", hint=error.hint) from cause
    if not isinstance(made, Environment):
        raise PluginError(
            f"environment {name!r} is of type {type(made).__name__}, not Environment",
            hint="give module:attribute of an Environment, or of a function that returns one",
        )
    if section.options and not inspect.isfunction(found):
        raise ConfigError(f"environment {name!r} takes no options; environment.options has {sorted(section.options)}")
    return made if made.name else replace(made, name=name)


def _call_factory(factory: Callable[..., object], section: EnvironmentSection) -> object:
    parameters = inspect.signature(factory).parameters
    for option in section.options:
        if option not in parameters:
            near = difflib.get_close_matches(option, parameters, n=1)
            raise ConfigError(
                f"environment {section.name!r} has no option {option!r} (environment.options)",
                hint=f"did you mean {near[0]!r}?" if near else f"options: {', '.join(parameters) or 'none'}",
            )
    try:
        return factory(**section.options)
    except TandemError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to the user's code, which must name its line
        raise PluginError(f"environment {section.name!r} could not be made: {describe(error)}") from error


def check_environment(environment: Environment) -> None:
    """Try every hook that can be tried without a model, on one task of each taskset.

    Raises:
        PluginError: a hook raised or gave the wrong thing; names file and line.
    """
    where = f"environment {environment.name!r}"
    check_rewards(environment.rewards, has_box=environment.template is not None)
    tasks = [environment.task(0, 0), *environment.held_out(1)]
    if environment.task(0, 0) != tasks[0]:
        raise PluginError(f"{where}: task 0 of seed 0 differs from call to call; draw from the given seed alone")
    for task in tasks:
        if not task.messages:
            raise PluginError(f"{where}: task {task.id!r} has no messages")
        if task.files and environment.template is None:
            raise PluginError(f"{where}: task {task.id!r} has files, but template=None gives no box to put them in")
        if environment.template is None and any("box" in tool.supplied for tool in environment.workflow.tools):
            raise PluginError(f"{where}: its tools use the box, but template=None gives none")
    demonstration(environment, tasks[0])


def demonstration(environment: Environment, task: Task) -> tuple[Message, ...] | None:
    """A finished conversation for ``task``, its own messages included; None if the environment has none.

    Raises:
        PluginError: the hook raised, or its messages do not end with an assistant's.
    """
    if environment.demonstrate is None:
        return None
    where = f"environment {environment.name!r}: demonstrate({task.id!r})"
    try:
        added = tuple(environment.demonstrate(task))
    except (Exception, SystemExit) as error:  # the boundary to the user's code, which must name its line
        raise PluginError(f"{where} raised {describe(error)}") from error
    if not added or not all(isinstance(each, Message) for each in added) or added[-1].role is not Role.ASSISTANT:
        raise PluginError(f"{where} must give the messages after the task's own, the last one an assistant's")
    return (*task.messages, *added)


def _made(taskset: Taskset, seed: int, index: int, what: str) -> Task:
    try:
        made = taskset.get(seed, index)
    except TandemError:
        raise
    except (Exception, SystemExit) as error:  # the boundary to the user's code, which must name its line
        raise PluginError(f"{what} raised {describe(error)}") from error
    if not isinstance(made, Task):
        raise PluginError(f"{what} is of type {type(made).__name__}, not Task")
    return made
