"""``tandem sandbox serve`` and the commands that talk to it: one server, real boxes."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from tandem.cli.main import run

PROGRAM = [sys.executable, "-m", "tandem.cli.main", "sandbox"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A server, and the environment in which commands find it."""
    folder = tmp_path_factory.mktemp("home")
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    server = subprocess.Popen([*PROGRAM, "serve", "--port", "0"], env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        line = server.stdout.readline()
        if "serving sandboxes" not in line:
            pytest.skip(f"no server on this machine: {line}{server.communicate(timeout=30)[1]}")
        made = tandem(environment, "start")
        if made.returncode:
            pytest.skip(f"this machine makes no boxes: {made.stderr}")
        tandem(environment, "rm", made.stdout.strip())
        yield environment
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
    assert server.returncode == 0


def tandem(environment, *words, given=""):
    """One command, in this process: an interpreter for each would be most of the time."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode()))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(["sandbox", *words])
        out.flush()
        err.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(words, code, *texts)


@pytest.fixture(scope="module")
def box(home):
    made = tandem(home, "start", "--label", "job=7", "--env", "NAME=value", "--lifetime", "600")
    assert made.returncode == 0, made.stderr
    yield made.stdout.strip()
    tandem(home, "rm", made.stdout.strip())  # boxes outlive their server


def test_exec_gives_output_and_exit_code(home, box):
    done = tandem(home, "exec", box, "--", "sh", "-c", "echo $NAME; echo oops >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "value\n", "oops\n")
    assert tandem(home, "exec", box, "echo one | tr o 0").stdout == "0ne\n"
    late = tandem(home, "exec", "--timeout", "1", box, "echo before; sleep 60")
    assert late.returncode == 124 and late.stdout == "before\n" and "time limit" in late.stderr


def test_files_go_in_and_out(home, box, tmp_path):
    source = tmp_path / "note.txt"
    source.write_text("hello\n")
    assert tandem(home, "upload", box, str(source)).returncode == 0
    assert tandem(home, "upload", box, "-", "/tmp/piped", given="piped").returncode == 0
    assert tandem(home, "exec", box, "cat note.txt /tmp/piped").stdout == "hello\npiped"
    assert tandem(home, "download", box, "note.txt").stdout == "hello\n"
    assert tandem(home, "download", box, "note.txt", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_text() == "hello\n"
    missing = tandem(home, "download", box, "nothing")
    assert missing.returncode == 1 and "nothing" in missing.stderr


def test_list_timeout_top_and_rm(home, box):
    listed = tandem(home, "ls", "--label", "job=7")
    assert box in listed.stdout and "job=7" in listed.stdout and "running" in listed.stdout
    assert box not in tandem(home, "ls", "--label", "job=8").stdout
    assert tandem(home, "timeout", box, "900").returncode == 0
    assert tandem(home, "top").stdout.startswith("id")
    other = tandem(home, "start").stdout.strip()
    assert tandem(home, "rm", other).returncode == 0
    again = tandem(home, "rm", other)
    assert again.returncode == 1 and "not found" in again.stderr
    assert tandem(home, "exec", other, "id").returncode == 1


def test_a_live_fork_wants_a_running_command(home, box):
    refused = tandem(home, "fork", box, "--live")
    assert refused.returncode and not refused.stdout
    assert "no long-lived command" in refused.stderr or "cannot live fork" in refused.stderr


def test_the_box_of_a_passed_lifetime_is_gone(home):
    short = tandem(home, "start", "--lifetime", "1").stdout.strip()
    deadline = time.monotonic() + 30
    while short in tandem(home, "ls").stdout:
        assert time.monotonic() < deadline, "still listed"
        time.sleep(0.2)


def test_audit(home, box):
    shown = tandem(home, "audit")
    assert "create" in shown.stdout and box in tandem(home, "audit", "show", "--last", "1000").stdout
    whole = tandem(home, "audit", "verify")
    assert whole.returncode == 0 and "all as they were written" in whole.stdout
    wrong = tandem(home, "audit", "verify", "--head", "100000:00")
    assert wrong.returncode == 1 and "the end is lost" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [(("start", "no-such-template"), "no-such-template"), (("start", "--env", "X"), "NAME=VALUE"),
     (("upload", "x", "/nowhere"), "no file"), (("audit", "mend"), "show or verify")],
)  # fmt: skip
def test_wrong_words(home, words, hint):
    done = tandem(home, *words)
    assert done.returncode != 0 and hint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_key(home, box):
    done = tandem(home, "ls", "--key", "wrong")
    assert done.returncode == 2 and "API key" in done.stderr
