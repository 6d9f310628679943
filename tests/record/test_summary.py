"""The page of text at the end of a run."""

from run_pieces import envelopes, small_run, started

from tandem.record.log import EventLog
from tandem.record.metrics import fold
from tandem.record.summary import number, summarise_metrics, summarise_run, table


def test_it_says_what_was_learned_and_what_failed(tmp_path):
    with EventLog(tmp_path) as log:
        for event in small_run():
            log.emit(event)
    text = summarise_run(tmp_path)
    rows = [line.split() for line in text.splitlines()]
    assert ["before", "0", "0.250", "-", "0.250", "4", "3", "1"] in rows
    assert ["after", "reinforcement", "2", "0.750", "+0.500", "0.750", "4", "3", "1"] in rows
    for part in ("reinforcement: 2 steps, reward 0.500 to 1.000", "3 scored, 1 failed", "shell: timeout 1",
                 "sandbox 1", "prefix cache: 40%"):  # fmt: skip
        assert part in text


def test_an_empty_run_has_no_made_up_numbers():
    text = summarise_metrics(fold(envelopes([started()])))
    assert "reward" not in text and "success" not in text
    assert number(None) == "-" and number(0.0) == "0.000"


def test_columns_are_aligned():
    assert table([["a", "b"], ["long", "1"]]) == "a     b\n----  -\nlong  1"
