"""Pictures of runs."""

import msgspec
import pytest
from run_pieces import small_run, started, step

from tandem.core.errors import RecordError
from tandem.core.events import EvaluationFinished, StepFinished
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


def test_a_run_in_which_nothing_was_scored_draws_without_a_word(tmp_path, recwarn):
    events = [event for event in small_run() if not isinstance(event, EvaluationFinished | StepFinished)]
    failed = EvaluationFinished(name="before", step=0, num_tasks=2, num_failed=2, mean_reward=None, success=None,
                                by_family={}, duration_s=1.0)  # fmt: skip
    assert draw_curve(write(tmp_path / "a", [*events, failed])).stat().st_size
    assert not recwarn.list


def test_a_run_on_data_draws_its_losses(tmp_path):
    measured = msgspec.structs.replace(step(2, reward=None, loss=0.25), metrics={"eval_loss": 0.5})
    run = write(tmp_path / "a", [started(), step(1, reward=None, loss=0.75), measured])
    text = draw_curve(run, tmp_path / "loss.svg").read_text()
    assert "<!-- loss -->" in text and "<!-- loss of held-out rows -->" in text and "reward" not in text


def test_a_picture_that_cannot_be_made_is_a_clear_error(tmp_path):
    run = write(tmp_path / "a", small_run())
    with pytest.raises(RecordError, match="unknown kind of picture '.foo'"):
        draw_curve(run, tmp_path / "x.foo")
    with pytest.raises(RecordError, match="cannot be written"):
        draw_curve(run, tmp_path / "no" / "x.png")
