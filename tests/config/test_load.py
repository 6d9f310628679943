"""Defaults < files < flags, with origins; every mistake is one sentence that says what, where and the nearest."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.load import DEFAULT, from_mapping, load, overlay
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_empty_recipe_is_all_defaults():
    recipe, origins = load()
    assert recipe == Recipe()
    assert set(origins.values()) == {DEFAULT}


def test_flags_win_over_files_and_later_files_over_earlier_ones(tmp_path):
    first = write(tmp_path, "a.toml", "[rollout]\ngroup_size = 2\nmax_turns = 3\n[trainer]\nsteps = 7\nseed = 5\n")
    second = write(tmp_path, "b.yaml", "rollout:\n  group_size: 3\ntrainer:\n  steps: 8\n")
    recipe, origins = load([first, second], ["--trainer.steps", "9", "--environment.options.size=4"])
    assert (recipe.rollout.group_size, recipe.rollout.max_turns) == (3, 3)
    assert (recipe.trainer.steps, recipe.trainer.seed) == (9, 5)
    assert recipe.environment.options == {"size": 4}
    assert origins["rollout.max_turns"] == f"{first}:3"
    assert origins["rollout.group_size"] == f"{second}:2"
    assert origins["trainer.steps"] == "flag --trainer.steps"
    assert origins["environment.options.size"] == "flag --environment.options.size"
    assert origins["optimizer.learning_rate"] == DEFAULT


def test_flag_values_of_every_type():
    words = (
        "--trainer.deterministic --engine.infer.prefix-cache no --optimizer.learning-rate 1e-4 --trainer.seed -3 "
        "--algorithm.clip-low null --algorithm.clip-high .3 --record.sinks console,console --engine.numerics fast"
    )
    recipe, _ = load(flags=words.split())
    assert recipe.trainer.deterministic and not recipe.engine.infer.prefix_cache
    assert recipe.optimizer.learning_rate == 1e-4 and recipe.trainer.seed == -3
    assert recipe.algorithm.clip_low is None and recipe.algorithm.clip_high == 0.3
    assert recipe.record.sinks == ("console", "console") and recipe.engine.numerics == "fast"


def test_options_of_an_environment_merge_unless_given_whole(tmp_path):
    file = write(tmp_path, "a.toml", '[environment.options]\nsize = 3\nlevel = "hard"\n')
    assert load([file], ["--environment.options.size", "5"])[0].environment.options == {"size": 5, "level": "hard"}
    assert load([file], ["--environment.options", '{"size": 5}'])[0].environment.options == {"size": 5}


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ("--rolout.group-size 4", "no option --rolout.group-size", "--rollout.group-size"),
        ("--group-size 4", "no option --group-size", "--rollout.group-size"),
        ("--rollout.group-size x", "--rollout.group-size must be a whole number, got 'x'", ""),
        ("--rollout.group-size 2.5", "rollout.group_size (flag --rollout.group-size): must be a whole number", ""),
        ("--rollout.group-size 0", "must be greater than or equal to 1, got 0", ""),
        ("--rollout.group-size", "--rollout.group-size needs a value: a whole number", ""),
        ("--trainer.steps --trainer.seed 1", "--trainer.steps needs a value", ""),
        ("--engine.numerics exakt", "must be one of exact, fast, got \"exakt\"", "exact"),
        ("--optimizer.learning-rate nan", "must be a finite number", ""),
        ("--environment.options 3", "must be a table (JSON), got '3'", ""),
        ("word", "unexpected argument 'word'", "--table.key value"),
        ("--trainer.deterministic --rollout.staleness 2", "trainer.deterministic needs rollout.staleness = 0", ""),
        ("--rollout.top-p 0.9", "truncate the sampler's support", ""),
        ("--rollout.max-turn-tokens 4096", "rollout.max_turn_tokens (4096) must be below", ""),
    ],
)
def test_wrong_flags(flags, message, hint):
    with pytest.raises(ConfigError) as error:
        load(flags=flags.split())
    assert message in error.value.message
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        ("a.toml", "[rollout]\ngroupsize = 4\n", "a.toml:2: no key 'rollout.groupsize'", "rollout.group_size"),
        ("a.toml", "[rolout]\ngroup_size = 4\n", "a.toml:1: no table 'rolout'", "rollout"),
        ("a.toml", "[trainer]\ngroup_size = 4\n", "no key 'trainer.group_size'", "rollout.group_size"),
        ("a.toml", 'rollout = "x"\n', 'rollout (', "tandem config"),
        ("a.toml", '[rollout]\ngroup_size = "four"\n', 'rollout.group_size (', ""),
        ("a.toml", "[rollout\n", "is not valid TOML", ""),
        ("a.toml", '[model]\ndtype = "float16"\n', 'must be one of float32, bfloat16, got "float16"', "did you mean"),
        ("b.yaml", "rollout:\n  group_siz: 4\n", "b.yaml:2: no key 'rollout.group_siz'", "rollout.group_size"),
        ("b.yaml", "rollout: [\n", "is not valid YAML", ""),
        ("b.yaml", "- 1\n", "must hold tables, got list", ""),
        ("c.json", "{}", "unknown kind of file", ".toml"),
    ],
)
def test_wrong_files(tmp_path, name, text, message, hint):
    with pytest.raises(ConfigError) as error:
        load([write(tmp_path, name, text)])
    assert message in error.value.message
    assert hint in error.value.hint or hint == "tandem config"


def test_a_missing_file_names_a_near_one(tmp_path):
    write(tmp_path, "demo.toml", "")
    with pytest.raises(ConfigError, match="No such file") as error:
        load([tmp_path / "dmo.toml"])
    assert "demo.toml" in error.value.hint


def test_all_wrong_values_are_named_at_once(tmp_path):
    file = write(tmp_path, "a.toml", "[rollout]\ngroup_size = 0\nmax_turns = 0\n")
    with pytest.raises(ConfigError) as error:
        load([file])
    assert [f"a.toml:{line}" in error.value.message for line in (2, 3)] == [True, True]


def test_a_saved_tree_loads_back_and_a_foreign_one_is_refused():
    recipe, _ = load(flags=["--record.sinks", "[]", "--trainer.steps", "3"])
    assert from_mapping(recipe.model_dump(mode="json")) == recipe
    with pytest.raises(ConfigError, match="no such key"):
        from_mapping({"trainer": {"stepz": 1}})


def test_flags_lie_over_a_resolved_recipe():
    recipe, origins = load(flags=["--environment.options.size", "3", "--trainer.steps", "5"])
    changed, where = overlay(recipe, origins, ["--trainer.steps", "6"])
    assert changed.trainer.steps == 6 and changed.environment.options == {"size": 3}
    assert where["trainer.steps"] == "flag --trainer.steps" and where["trainer.seed"] == DEFAULT
    assert where["environment.options.size"] == "flag --environment.options.size"


def test_loading_imports_nothing_heavy():
    program = (
        "import sys; from tandem.config.load import load; load(); "
        "print({'torch', 'numpy', 'transformers', 'yaml'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"
