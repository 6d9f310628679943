"""Pictures of runs."""

import pytest
from run_pieces import small_run, started

from tandem.core.errors import RecordError
from tandem.record.curve import draw_curve, draw_curves
from tandem.record.log import EventLog


def write(folder, events):
    with EventLog(folder) as log:
        for event in events:
            log.emit(event)
    return folder


def test_one_run_and_several(tmp_path):
    first, second = write(tmp_path / "a", small_run()), write(tmp_path / "b", small_run())
    assert draw_curve(first).read_bytes().startswith(b"\x89PNG")
    text = draw_curves([first, second], tmp_path / "both.svg").read_text()
    assert "<svg" in text


def test_a_run_without_steps_has_no_curve(tmp_path):
    with pytest.raises(RecordError, match="nothing to draw"):
        draw_curve(write(tmp_path / "a", [started()]))


def test_a_picture_that_cannot_be_made_is_a_clear_error(tmp_path):
    run = write(tmp_path / "a", small_run())
    with pytest.raises(RecordError, match="unknown kind of picture '.foo'"):
        draw_curve(run, tmp_path / "x.foo")
    with pytest.raises(RecordError, match="cannot be written"):
        draw_curve(run, tmp_path / "no" / "x.png")
