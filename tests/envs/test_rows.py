"""The same rows out of every format; what is broken is named."""

from __future__ import annotations

import csv
import json

import pytest

from tandem.core.errors import ConfigError
from tandem.envs.rows import data_files, read_rows

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ä\n", "completion": "d"}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "saved data set"])
def test_every_format_gives_the_same_rows(kind, tmp_path) -> None:
    file = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        file.write_text("\n\n".join(map(json.dumps, ROWS)))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "csv":
        with file.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = arrow.Table.from_pylist(ROWS)
        if kind == "parquet":
            parquet.write_table(table, file)
        elif kind == "arrow":
            with arrow.ipc.new_file(str(file), table.schema) as writer:
                writer.write_table(table)
        else:  # as datasets.save_to_disk lays it out
            file = tmp_path / "saved"
            file.mkdir()
            with arrow.ipc.new_stream(str(file / "data-00000-of-00001.arrow"), table.schema) as writer:
                writer.write_table(table)
            (file / "state.json").write_text("{}")
            (file / "dataset_info.json").write_text("{}")
    assert list(read_rows(file)) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("a.jsonl", '{"a": 1}\n{oops', "line 2"), ("a.jsonl", "3", "line 1"), ("a.json", "{}", "list"),
     ("a.txt", "", "unknown format"), ("a.parquet", "no", "broken")],
)  # fmt: skip
def test_what_is_broken_is_named(name, text, said, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(read_rows(tmp_path / name))


def test_nothing_there_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        list(read_rows(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no data files"):
        list(read_rows(tmp_path))


LAYOUTS = {  # how splits are laid out: saved by the library, as a repository of the hub, by hand
    "saved": ["train/data-00000-of-00002.jsonl", "train/data-00001-of-00002.jsonl", "test/data-00000-of-00001.jsonl"],
    "hub": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"],
    "by hand": ["my_train.jsonl", "my_train_2.jsonl", "my_eval.jsonl"],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_splits_are_never_mixed(layout, tmp_path) -> None:
    for file in layout:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({"from": file}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [row["from"] for row in read_rows(tmp_path)] == layout[:2]
    assert [row["from"] for row in read_rows(tmp_path, split="test")] == layout[2:]
    with pytest.raises(ConfigError, match="no split 'validation'") as caught:
        data_files(tmp_path, split="validation")
    assert "test, train" in str(caught.value.hint)


def test_which_split_is_asked_where_none_is_called_train(tmp_path) -> None:
    for name in ("test.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="no split 'train'"):
        data_files(tmp_path)
    with pytest.raises(ConfigError, match="one file"):
        data_files(tmp_path / "test.jsonl", split="test")
    (tmp_path / "dev.jsonl").unlink()
    assert len(data_files(tmp_path)) == 1  # one split alone needs no choice
    (tmp_path / "test.jsonl").rename(tmp_path / "a.jsonl")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "more.jsonl").write_text('{"a": 2}')
    assert len(data_files(tmp_path)) == 2  # nothing tells of splits: all of it
