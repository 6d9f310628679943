"""The same rows out of every format; what is broken is named."""

from __future__ import annotations

import csv
import json

import pytest

from tandem.core.errors import ConfigError
from tandem.envs.rows import read_rows

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
