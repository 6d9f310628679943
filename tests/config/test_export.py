"""What readers get is made from the tree."""

import json

from tandem.config.export import dump, reference, schema
from tandem.config.fields import options
from tandem.config.load import load


def test_a_dumped_recipe_loads_to_itself(tmp_path):
    recipe, origins = load(flags=["--environment.options.size", "3", "--trainer.steps", "5", "--record.sinks", "[]"])
    for text in (dump(recipe), dump(recipe, origins), dump(recipe, comments=True)):
        (tmp_path / "a.toml").write_text(text)
        assert load([tmp_path / "a.toml"])[0] == recipe
    assert "# flag --trainer.steps" in dump(recipe, origins)


def test_every_option_has_a_sentence_and_is_in_the_reference():
    text = reference()
    for option in options().values():
        assert option.doc.endswith((".", ")", "`")) and len(option.doc) > 10, option.path
        assert f"`{option.path}`" in text


def test_one_table_alone():
    assert "`engine.infer.block_size`" in reference("engine.infer")
    assert "engine.train" not in reference("engine.infer")


def test_the_schema_describes_every_table():
    text = json.dumps(schema())
    assert all(json.dumps(option.path.rpartition(".")[2]) in text for option in options().values())
