"""``tandem config``."""

import json

from tandem.cli.main import run
from tandem.config.load import load


def test_show_prints_a_recipe_that_loads(capsys, tmp_path):
    (tmp_path / "a.toml").write_text("[trainer]\nsteps = 3\n")
    assert run(["config", "show", "--rollout.group-size", "4", str(tmp_path / "a.toml"), "--origins"]) == 0
    text = capsys.readouterr().out
    assert "a.toml:2" in text and "# flag --rollout.group-size" in text
    (tmp_path / "b.toml").write_text(text)
    recipe, _ = load([tmp_path / "b.toml"])
    assert (recipe.trainer.steps, recipe.rollout.group_size) == (3, 4)


def test_schema_and_reference(capsys):
    assert run(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Tandem recipe"
    assert run(["config", "reference", "rollout"]) == 0
    assert "`rollout.group_size`" in capsys.readouterr().out
