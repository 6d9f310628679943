"""Reading back: what counts, and whether it is whole."""

import pytest
from run_pieces import finished_episode, started, step

from tandem.core.errors import RecordError
from tandem.core.events import RunResumed, StepFinished
from tandem.core.types import Episode
from tandem.core.wire import encode
from tandem.record.log import EventLog
from tandem.record.replay import episodes, load_episode, read, read_all, verify


def test_what_a_resume_went_back_behind_is_not_counted(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(started())
        keep = log.emit(step(1))
        log.emit(step(2, reward=0.1))
        log.emit(RunResumed(step=1, keep_sequence=keep, checkpoint=""))
        log.emit(step(2, reward=0.2))
        log.emit(RunResumed(step=1, keep_sequence=keep, checkpoint=""))
        log.emit(step(2, reward=0.3))
    kept = [each.event for each in read(tmp_path) if isinstance(each.event, StepFinished)]
    assert [(event.step, event.mean_reward) for event in kept] == [(1, 0.5), (2, 0.3)]
    assert sum(isinstance(each.event, RunResumed) for each in read(tmp_path)) == 2
    assert len(list(read_all(tmp_path))) == 7


@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("change", ["edit", "remove", "swap"])
def test_the_first_bad_event_is_named(tmp_path, line, change):
    with EventLog(tmp_path) as log:
        for number in range(4):
            log.emit(step(number + 1))
    path = tmp_path / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "edit":
        lines[line] = lines[line].replace(b'"num_tokens":20', b'"num_tokens":21')
    elif change == "remove":
        del lines[line]
    else:
        lines[line], lines[line + 1] = lines[line + 1], lines[line]
    path.write_bytes(b"".join(lines))
    verdict = verify(tmp_path)
    assert verdict.num_events == (line + 1 if change == "edit" else line)
    assert f"event {verdict.num_events} does not follow" in verdict.problem


def test_an_episode_is_found_whole_or_refused(tmp_path):
    episode = Episode(id="e1", task_id="t", group_id="g", index=0, attempt=0, seed=3, turns=(), reward=1.0)
    with EventLog(tmp_path) as log:
        log.emit(finished_episode("e1", blob=log.put_blob(encode(episode))))
    assert list(episodes(tmp_path)) == ["e1"] and load_episode(tmp_path, "e1") == episode
    with pytest.raises(RecordError, match="has no episode 'x'") as error:
        load_episode(tmp_path, "x")
    assert "e1" in error.value.hint
    (blob,) = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    blob.write_bytes(b"")
    assert "was changed" in verify(tmp_path).problem


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RecordError, match="no run in"):
        read(tmp_path)


def test_a_change_of_the_very_last_event_is_seen(tmp_path):
    with EventLog(tmp_path) as log:
        log.emit(step(1))
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"num_tokens":20', b'"num_tokens":21'))
    assert verify(tmp_path).problem == "event 0 is not the one that was written"
