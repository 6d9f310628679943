"""The program of file verbs, as a process of this machine."""

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.serve.e2b import box_program

PROGRAM = [sys.executable, "-S", "-c", Path(box_program.__file__).read_text()]


def ask(*words, given=b""):
    done = subprocess.run([*PROGRAM, *map(str, words)], input=given, capture_output=True, timeout=20)
    return done.stdout


def test_verbs(tmp_path):
    assert json.loads(ask("write", tmp_path / "new/deep/f", given=b"\0bytes"))["answer"] is None
    assert ask("read", tmp_path / "new/deep/f") == b"\0bytes"
    told = json.loads(ask("stat", tmp_path / "new/deep/f"))["answer"]
    assert told["size"] == 6 and told["target"] == ""
    (tmp_path / "link").symlink_to("new")
    flat = {one["path"] for one in json.loads(ask("entries", tmp_path, 1))["answer"]}
    deep = {one["path"] for one in json.loads(ask("entries", tmp_path, 3))["answer"]}
    assert flat == {str(tmp_path / "link"), str(tmp_path / "new")}
    assert deep == flat | {str(tmp_path / "new/deep"), str(tmp_path / "new/deep/f")}  # links are not followed
    ask("move", tmp_path / "new/deep/f", tmp_path / "other/g")
    assert (tmp_path / "other/g").read_bytes() == b"\0bytes"
    ask("remove", tmp_path / "link")
    assert (tmp_path / "new").is_dir()  # the link, not what it leads to
    ask("remove", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("verb", "more", "number"),
    [("stat", (), errno.ENOENT), ("entries", (1,), errno.ENOENT), ("watch", (0,), errno.ENOENT),
     ("remove", (), errno.ENOENT)],
)  # fmt: skip
def test_errors_have_their_number(tmp_path, verb, more, number):
    assert json.loads(ask(verb, tmp_path / "none", *more))["errno"] == number


@pytest.mark.parametrize("recursive", [0, 1])
def test_watch(tmp_path, recursive):
    (tmp_path / "sub").mkdir()
    with subprocess.Popen([*PROGRAM, "watch", str(tmp_path), str(recursive)], stdout=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline()) == {"answer": None}
        (tmp_path / "sub" / "inner").write_text("x")
        (tmp_path / "f").write_text("x")
        (tmp_path / "f").rename(tmp_path / "g")
        (tmp_path / "g").unlink()
        seen = []
        while ("g", "remove") not in seen:
            told = json.loads(process.stdout.readline())
            seen.append((told["name"], told["kind"]))
        process.kill()
    assert [
        one for one in seen if one[0] in "fg"
    ] == [("f", "create"), ("f", "write"), ("f", "rename"), ("g", "create"), ("g", "remove")]
    assert (("sub/inner", "create") in seen) == bool(recursive)


def test_a_folder_that_is_made_later_is_watched_from_its_first_file_on(tmp_path):
    with subprocess.Popen([*PROGRAM, "watch", str(tmp_path), "1"], stdout=subprocess.PIPE) as process:
        deadline = threading.Timer(20, process.kill)
        deadline.start()
        assert json.loads(process.stdout.readline()) == {"answer": None}
        (tmp_path / "late" / "deep").mkdir(parents=True)
        (tmp_path / "late" / "deep" / "f").write_text("x")
        seen = set()
        while ("late/deep/f", "create") not in seen:
            told = json.loads(process.stdout.readline())
            seen.add((told["name"], told["kind"]))
        assert {("late", "create"), ("late/deep", "create")} <= seen
        deadline.cancel()
        process.kill()
