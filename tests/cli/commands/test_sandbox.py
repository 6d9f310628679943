"""``tandem sandbox run``: one real box."""

import subprocess
import sys

PROGRAM = [sys.executable, "-m", "tandem.cli.main", "sandbox", "run"]


def box(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=300)


def test_output_files_and_exit_code(tmp_path):
    (tmp_path / "note.txt").write_text("hello\n")
    done = box("--file", str(tmp_path / "note.txt"), "--", "sh", "-c", "cat note.txt; echo oops >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "hello\n", "oops\n")


def test_flags_reach_the_box_and_the_deadline_holds():
    done = box("--sandbox.output-kb=1", "--timeout", "5", "python3", "-c", "print('x' * 5000)")
    assert done.returncode == 0 and "bytes of output were dropped" in done.stderr
    assert box("--timeout", "0.5", "--", "sleep", "60").returncode == 124
