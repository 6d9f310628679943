"""Environments by name, and the trial of their hooks: every mistake is one sentence with file and line."""

from pathlib import Path

import pytest

from tandem.config.sections.environment import EnvironmentSection
from tandem.core.errors import ConfigError, PluginError
from tandem.envs.environment import Environment, check_environment, demonstration, load_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "word_count.py"

GOOD = """
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task
from tandem.envs.workflow import tool_loop
def reward(episode):
    return 1.0
def make(seed, index):
    return task("q", id=f"t{index}")
def build(size: int = 3, level: str = "easy"):
    return Environment(tasks=generated(make, size=size), workflow=tool_loop(["python"]), rewards=[Reward(reward)])
env = build()
"""


def load(tmp_path, source, attribute="env", **options):
    path = tmp_path / "mine.py"
    path.write_text(source)
    return load_environment(EnvironmentSection(name=f"{path}:{attribute}", options=options))


def test_the_example_is_short_and_passes_its_trial():
    environment = load_environment(EnvironmentSection(name=f"{EXAMPLE}:word_count"))
    check_environment(environment)
    assert len(EXAMPLE.read_text().splitlines()) < 80
    assert environment.task(0, 5) == environment.task(0, 5) != environment.task(1, 5)
    held_out = environment.held_out(4)
    assert len(held_out) == 4 and held_out == environment.held_out(4)
    shown = demonstration(environment, held_out[0])
    assert shown is not None and shown[-1].content == str(held_out[0].private["answer"])
    assert environment.rewards[0].reference == f"{EXAMPLE}:is_right"


def test_by_path_and_by_factory(tmp_path):
    environment = load(tmp_path, GOOD)
    assert isinstance(environment, Environment) and environment.name.endswith("mine.py:env")
    check_environment(environment)
    assert demonstration(environment, environment.task(0, 0)) is None and environment.held_out(3) == []


def test_factories_take_options(tmp_path):
    assert load(tmp_path, GOOD, "build", size=2).tasks.size == 2


@pytest.mark.parametrize(
    ("source", "attribute", "options", "kind", "said"),
    [
        ("x = 1\ndef broken(:\n", "env", {}, PluginError, "mine.py:2"),
        ("x = 1\n\ny = x / 0\n", "env", {}, PluginError, "mine.py:3"),
        ("import no_such_module\n", "env", {}, PluginError, "mine.py:1"),
        (GOOD, "enw", {}, PluginError, "no 'enw'"),
        (GOOD, "make", {}, PluginError, "could not be made: TypeError"),
        ("env = 3\n", "env", {}, PluginError, "is of type int, not Environment"),
        (GOOD, "build", {"siz": 1}, ConfigError, "no option 'siz'"),
        (GOOD, "env", {"size": 1}, ConfigError, "takes no options"),
        (GOOD.replace("(reward)", "(lambda e: 1)"), "env", {}, PluginError, "unknown parameter 'e'"),
        (GOOD.replace("(reward)", "(lambda episode: 1)"), "env", {}, PluginError, "not a module-level function"),
        (GOOD.replace("reward(episode)", "reward(box)"), "env", {}, PluginError, "takes the box but is not async"),
        (GOOD.replace('"python"', '"pyton"'), "env", {}, PluginError, "no stock tool named 'pyton'"),
    ],
)
def test_what_does_not_load_says_where(tmp_path, source, attribute, options, kind, said):
    with pytest.raises(kind) as raised:
        load(tmp_path, source, attribute, **options)
    assert said in raised.value.message
    if "siz" in options:
        assert "did you mean 'size'?" in raised.value.hint


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(PluginError, match="no environment named 'boxwrok'") as raised:
        load_environment(EnvironmentSection(name="boxwrok"))
    assert "boxwork" in raised.value.hint


def swap(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (swap('task("q", id=f"t{index}")', '{}["x"]'), "raised KeyError: 'x' (mine.py:9)"),
        (swap('task("q", id=f"t{index}")', "3"), "is of type int, not Task"),
        ("import itertools\ncount = itertools.count()" + swap('f"t{index}"', "str(next(count))"), "differs from call"),
        (swap("rewards=[Reward(reward)]", "rewards=[]"), "no reward with a weight"),
        (swap("rewards=[Reward(reward)]", "rewards=[Reward(reward), Reward(reward)]"), "two rewards share a name"),
        (swap("rewards=[", "template=None, rewards=["), "its tools use the box"),
        (swap("rewards=[", "demonstrate=lambda task: 1 / 0, rewards=["), "division by zero (mine.py:"),
        (swap("rewards=[", "demonstrate=lambda task: [], rewards=["), "the last one an assistant's"),
    ],
)  # fmt: skip
def test_the_trial_finds_broken_hooks(tmp_path, source, said):
    environment = load(tmp_path, source)
    with pytest.raises(PluginError) as raised:
        check_environment(environment)
    assert said in raised.value.message
