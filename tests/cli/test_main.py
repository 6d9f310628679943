"""The program as a user meets it: exit codes, messages, light start. Commands that load models are tested with app."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.main import run
from tandem.core.errors import SandboxGone

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numpy", "matplotlib", "starlette", "uvicorn"}


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_names_every_command(capsys):
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for name in ("train", "eval", "serve", "runs", "config", "plugins", "doctor", "new", "sandbox"):
        assert f"  {name} " in out


@pytest.mark.parametrize("command", ["train", "eval", "serve", "runs show", "config show", "sandbox run"])
def test_help_of_every_command_works(capsys, command):
    code, out, _ = said(capsys, *command.split(), "--help")
    assert code == 0 and "Usage: tandem" in out


def test_the_program_starts_light():
    program = f"import sys, tandem.cli.main; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("trian", 2, "Did you mean 'train'"),
        ("train --resum x", 2, "did you mean --resume?"),
        ("train --rolout.group-size 3", 2, "did you mean --rollout.group-size?"),
        ("train --trainer.steps many", 2, "--trainer.steps must be a whole number, got 'many'"),
        ("train --record.sinks consle", 2, "each one of console, got"),
        ("train --engine.name sglang", 2, "must be one of tandem, vllm, got"),
        ("train no-such.toml", 2, "No such file"),
        ("train --environment.name boxwrok", 2, "did you mean boxwork?"),
        ("train --resume no-such-run", 1, "no run 'no-such-run'"),
        ("runs show", 2, "Missing argument"),
        ("runs show nothing", 1, "no run 'nothing'"),
        ("config reference rolout", 2, "no table 'rolout'"),
        ("sandbox run", 2, "no command to run"),
    ],
)
def test_mistakes_end_with_one_message(capsys, monkeypatch, tmp_path, words, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = said(capsys, *words.split())
    assert (got, message in err) == (code, True), err
    assert "Traceback" not in err


def test_a_missing_model_is_found_before_anything_starts(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, "config", "check", "--model.path", str(tmp_path / "nothing"))
    assert code != 0 and "nothing" in err and "hint:" in err


def test_a_network_rule_that_is_none_is_found_with_its_key(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, "config", "check", "--sandbox.network.allow", '["good.org", "10.0.0.0/99"]')
    assert code == 2 and "sandbox.network.allow" in err and "10.0.0.0/99" in err and "hint:" in err


def test_a_resumed_run_keeps_its_recipe(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, "train", "--resume", "x", "--trainer.steps", "9")
    assert code == 2 and "would change it" in err


def test_interrupts_and_other_errors_have_their_codes(capsys, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def fail(*_: object, **__: object) -> None:
        raise SandboxGone("box 7 is gone", hint="try again")

    monkeypatch.setattr("tandem.cli.commands.config.dump", stop)
    assert said(capsys, "config", "show")[0] == 130
    monkeypatch.setattr("tandem.cli.commands.config.dump", fail)
    code, _, err = said(capsys, "config", "show")
    assert code == 1 and err == "error: box 7 is gone\nhint: try again\n"


def test_a_closed_pipe_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m tandem.cli.main config schema | head -1", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
