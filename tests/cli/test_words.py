"""RUN arguments."""

import os

import pytest

from tandem.cli.words import run_folder
from tandem.core.errors import RecordError


def make(folder, name, age):
    (folder / name).mkdir(parents=True)
    log = folder / name / "events.jsonl"
    log.write_text("")
    os.utime(log, (1000 - age, 1000 - age))


def test_a_run_by_path_by_name_and_the_last(tmp_path):
    make(tmp_path, "a-1", 10)
    make(tmp_path, "b-2", 20)
    assert run_folder(str(tmp_path / "b-2")) == tmp_path / "b-2"
    assert run_folder("b-2", folder=tmp_path) == tmp_path / "b-2"
    assert run_folder("last", folder=tmp_path) == tmp_path / "a-1"
    with pytest.raises(RecordError, match="no run 'a-2'") as error:
        run_folder("a-2", folder=tmp_path)
    assert "a-1" in error.value.hint
    with pytest.raises(RecordError) as error:
        run_folder("last", folder=tmp_path / "none")
    assert "holds no runs" in error.value.hint
