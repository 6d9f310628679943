"""The driver of kernels, as a process of this machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.serve.e2b.envd import kernel_driver

SOURCE = Path(kernel_driver.__file__).read_text()


class Kernel:
    def __init__(self, folder):
        self.process = subprocess.Popen([sys.executable, "-u", "-c", SOURCE], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, cwd=folder)  # fmt: skip
        assert json.loads(self.process.stdout.readline()) == {"type": "ready"}

    def send(self, code, **more):
        self.process.stdin.write(json.dumps({"code": code} | more).encode() + b"\n")
        self.process.stdin.flush()

    def events(self):
        for line in self.process.stdout:
            event = json.loads(line)
            if event["type"] == "end":
                return
            yield event

    def run(self, code, **more):
        self.send(code, **more)
        events = list(self.events())
        assert events.pop(0)["type"] == "number_of_executions"
        return events


@pytest.fixture
def kernel(tmp_path):
    made = Kernel(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


def said(events, kind="stdout"):
    return "".join(event["text"] for event in events if event["type"] == kind)


def test_state_and_the_last_value(kernel):
    assert kernel.run("x = 41") == []
    (result,) = kernel.run("x + 1")
    assert result == {"type": "result", "is_main_result": True, "text": "42"}
    assert kernel.run("_ + 1")[0]["text"] == "43"
    assert kernel.run("def f():\n    return x\nNone") == []


def test_output_of_the_cell_and_its_children_comes_before_the_value(kernel):
    events = kernel.run("import os, sys\nprint('a')\nos.system('echo b')\nprint('c', file=sys.stderr)\n'v'")
    assert sorted(said(events)) == sorted("a\nb\n") and said(events, "stderr") == "c\n"
    assert events[-1]["type"] == "result"
    many = kernel.run("for i in range(20000): print(i)")
    assert said(many) == "".join(f"{i}\n" for i in range(20000))


def test_errors_end_the_cell_not_the_kernel(kernel):
    (error,) = kernel.run("def f():\n    1 / 0\nf()")
    assert error["name"] == "ZeroDivisionError" and "1 / 0" in error["traceback"]
    assert "kernel_driver" not in error["traceback"] and "<string>" not in error["traceback"]
    assert kernel.run("(")[0]["name"] == "SyntaxError"
    assert kernel.run("raise SystemExit(3)")[0]["name"] == "SystemExit"
    assert kernel.run("input()")[0]["name"] == "EOFError"
    assert kernel.run("1")[0]["text"] == "1"


def test_rich_values(kernel):
    html, png = "def _repr_html_(self): return '<i>'", "def _repr_png_(self): return b'\\x89'"
    (shown,) = kernel.run(f"class R:\n {html}\n {png}\nR()")
    assert shown["html"] == "<i>" and shown["png"] == "iQ=="
    assert kernel.run("{'a': [1]}")[0]["json"] == {"a": [1]}
    displayed = kernel.run("display(1); display(2); 3")
    assert [event["text"] for event in displayed] == ["1", "2", "3"]
    assert [event["is_main_result"] for event in displayed] == [False, False, True]
    html = "def _repr_html_(self): raise ValueError"
    (broken,) = kernel.run(f"class B:\n {html}\n def __repr__(self): return 'b'\nB()")
    assert broken["text"] == "b" and "html" not in broken


def test_environment_is_of_one_cell(kernel):
    assert kernel.run("import os; os.environ['A']", env_vars={"A": "b"})[0]["text"] == "'b'"
    assert kernel.run("os.environ.get('A', 'gone')")[0]["text"] == "'gone'"


def test_an_interrupt_ends_the_cell(kernel):
    kernel.send("y = 5\nprint('on', flush=True)\nimport time\ntime.sleep(100)")
    events = kernel.events()
    for event in events:
        if event["type"] == "stdout":
            kernel.process.send_signal(signal.SIGINT)
            break
    assert [event["name"] for event in events if event["type"] == "error"] == ["KeyboardInterrupt"]
    kernel.process.send_signal(signal.SIGINT)  # nothing runs: nothing is lost
    time.sleep(0.1)
    assert kernel.run("y")[0]["text"] == "5"


def test_between_cells_it_is_one_thread_with_three_streams(kernel):
    def threads_and_pipes():
        place = Path(f"/proc/{kernel.process.pid}")
        pipes = sum("pipe:" in str(fd.readlink()) for fd in (place / "fd").iterdir())
        return len(list((place / "task").iterdir())), pipes

    assert said(kernel.run("print(1)")) == "1\n" and threads_and_pipes() == (1, 2)
    kernel.run("import threading; e = threading.Event(); t = threading.Thread(target=e.wait, daemon=True); t.start()")
    assert threads_and_pipes()[0] > 1  # it may still write: it must not write to who reads the events
    assert said(kernel.run("print(2); e.set(); t.join()")) == "2\n" and threads_and_pipes() == (1, 2)


def test_what_a_cell_left_running_is_still_heard(kernel):
    kernel.run("import subprocess; p = subprocess.Popen(['sh', '-c', 'read x; echo late'], stdin=subprocess.PIPE)")
    assert said(kernel.run("p.stdin.write(b'x\\n'); p.stdin.close(); p.wait(); print('done')")) in (
        "late\ndone\n", "done\nlate\n",
    )  # fmt: skip
