"""``tandem runs``: from a real log."""

from tandem.cli.main import run
from tandem.core.events import EpisodeFinished, RunFinished, RunStarted, StepFinished
from tandem.core.types import Episode, FinishReason, Message, Role, Score, StopReason, Turn, floats, ids
from tandem.core.wire import encode
from tandem.record.log import EventLog


def write_run(folder):
    turn = Turn(
        prompt_ids=ids([1, 2, 3]), completion_ids=ids([4, 5]), logprobs=floats([-0.5, -1.5]), versions=ids([3, 3]),
        message=Message(role=Role.ASSISTANT, content="hi"), finish_reason=FinishReason.STOP,
    )  # fmt: skip
    episode = Episode(
        id="e1", task_id="t1", group_id="g1", index=0, attempt=0, seed=1, turns=(turn,), reward=1.0,
        scores=(Score(name="is_right", value=1.0),), stop_reason=StopReason.ANSWERED,
    )  # fmt: skip
    with EventLog(folder) as log:
        log.emit(RunStarted(run_id=folder.name, version="0", command="x", config_blob="", deterministic=False))
        blob = log.put_blob(encode(episode))
        log.emit(EpisodeFinished(
            episode_id="e1", group_id="g1", task_id="t1", index=0, attempt=0, reward=1.0, stop_reason="answered",
            failure=None, detail="", retried=False, num_turns=1, num_tokens=5, lease_s=0, model_s=1, tools_s=0,
            reward_s=0, total_s=1, blob=blob,
        ))  # fmt: skip
        log.emit(StepFinished(
            step=1, loss=0.1, grad_norm=1.0, learning_rate=1e-5, num_groups=1, num_samples=1, num_loss_tokens=2,
            num_tokens=5, mean_reward=0.75, metrics={}, rollout_s=1, train_s=1, total_s=2,
        ))  # fmt: skip
        log.emit(RunFinished(step=1, reason="finished"))


def test_list_show_verify_and_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    write_run(folder)
    assert run(["runs", "list"]) == 0
    out = capsys.readouterr().out
    assert "first" in out and "finished" in out and "0.750" in out
    assert run(["runs", "show", "last"]) == 0
    assert "reinforcement: 1 steps" in capsys.readouterr().out
    assert run(["runs", "show", "first", "--episodes"]) == 0
    assert "e1" in capsys.readouterr().out
    assert run(["runs", "verify", "first"]) == 0
    assert "4 events" in capsys.readouterr().out
    assert run(["runs", "curve", "first", "--out", "c.svg"]) == 0
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    log = folder / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b"0.75", b"0.95"))
    assert run(["runs", "verify", "first"]) == 1
    assert "event 3 does not follow" in capsys.readouterr().err


def test_an_unknown_episode_names_known_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first")
    assert run(["runs", "show", "first", "--episode", "e"]) == 1
    assert "such as: e1" in capsys.readouterr().err


def test_a_broken_log_does_not_hide_the_other_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "runs" / "second")
    (tmp_path / "runs" / "second" / "events.jsonl").write_bytes(b"{}\n")
    assert run(["runs", "list"]) == 0
    out = capsys.readouterr().out
    assert "finished" in out and "broken" in out
    assert run(["runs", "show", "second"]) == 1
    assert "tandem runs verify" in capsys.readouterr().err
