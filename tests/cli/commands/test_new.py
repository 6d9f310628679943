"""``tandem new environment`` writes something that works."""

import subprocess
import sys

from tandem.cli.main import run


def test_the_written_environment_passes_its_own_test(tmp_path, capsys):
    assert run(["new", "environment", "word_game", "--folder", str(tmp_path)]) == 0
    assert "tandem train --environment.name" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert len((tmp_path / "word_game.py").read_text().splitlines()) < 80


def test_nothing_is_overwritten_and_names_are_checked(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("keep")
    assert run(["new", "environment", "mine", "--folder", str(tmp_path)]) == 2
    assert (tmp_path / "mine.py").read_text() == "keep"
    assert run(["new", "environment", "not-a-name", "--folder", str(tmp_path)]) == 2
    assert "word_game" in capsys.readouterr().err


def test_an_unwritable_folder_is_said_and_the_commands_are_those_of_this_place(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    assert run(["new", "environment", "mine", "--folder", str(tmp_path / "file")]) == 2
    assert "choose another --folder" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # else the interpreter may be named from here
    monkeypatch.setattr("tandem.cli.commands.new.find_spec", lambda _: None)
    monkeypatch.setattr("tandem.app.supervise.shutil.which", lambda _: None)
    assert run(["new", "environment", "mine", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{sys.executable} -m pip install pytest" in out and f"check it: {sys.executable} -m pytest" in out
