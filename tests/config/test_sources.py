"""Syntax: lines as origins, whatever way a TOML or YAML file writes a key."""

import pytest

from tandem.config.sources import parse_words, read_file


@pytest.mark.parametrize(
    "text",
    ["[engine.infer]\nmax_num_seqs = 3\n", "[engine]\ninfer.max_num_seqs = 3\n", "\nengine.infer.max_num_seqs=3\n"],
)
def test_toml_lines(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    (value,) = read_file(tmp_path / "a.toml")
    assert (value.path, value.data, value.origin) == ("engine.infer.max_num_seqs", 3, f"{tmp_path / 'a.toml'}:2")


def test_an_inline_table_has_its_file_as_origin(tmp_path):
    (tmp_path / "a.toml").write_text("engine = { infer = { max_num_seqs = 3 } }\n")
    (value,) = read_file(tmp_path / "a.toml")
    assert (value.path, value.origin) == ("engine.infer.max_num_seqs", str(tmp_path / "a.toml"))


def test_an_empty_yaml_file_sets_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert read_file(tmp_path / "a.yaml") == []


def test_a_switch_before_another_flag_or_a_file_is_on():
    files, values = parse_words(["a.toml", "--trainer.deterministic", "b.toml", "--trainer.steps", "1"])
    assert files == ["a.toml", "b.toml"]
    assert [value.data for value in values] == [True, 1]


def test_entries_of_a_free_table_keep_their_type():
    given = ["--environment.options.level", "hard", "--environment.options.max-size", "3"]
    _, values = parse_words(given)
    assert [(value.path, value.data) for value in values] == [
        ("environment.options.level", "hard"), ("environment.options.max_size", 3),
    ]  # fmt: skip
