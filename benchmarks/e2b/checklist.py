"""What a user of E2B's Python SDK does, once each, against the server that ``E2B_API_URL`` and ``E2B_SANDBOX_URL``
name.

Runs under any release of the SDK; needs nothing else. Prints a JSON object: each check and ``ok`` or what went wrong.
Run it by ``benchmarks/e2b_sdks.py``, which starts a server and gives every release its own environment.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from e2b import CommandExitException, Sandbox, Template
from e2b.exceptions import TimeoutException

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def need(condition, what):
    if not condition:
        raise AssertionError(what)


@check
def create_and_run(box):
    done = box.commands.run("echo hello; echo oops >&2")
    need((done.stdout, done.stderr, done.exit_code) == ("hello\n", "oops\n", 0), done)
    try:
        box.commands.run("exit 7")
    except CommandExitException as error:
        need(error.exit_code == 7, error)
    else:
        raise AssertionError("exit code 7 was no exception")


@check
def environment_and_folder(box):
    done = box.commands.run("echo $NAME $OTHER; pwd", envs={"NAME": "value"}, cwd="/tmp")
    need(done.stdout == "value fixed\n/tmp\n", done)


@check
def stream(box):
    parts = []
    box.commands.run("for i in 1 2 3; do echo $i; sleep 0.1; done", on_stdout=parts.append)
    need("".join(parts) == "1\n2\n3\n" and len(parts) > 1, parts)


@check
def background_and_list_and_kill(box):
    command = box.commands.run("sleep 100", background=True)
    need(command.pid in [one.pid for one in box.commands.list()], "not listed")
    need(command.kill() is True, "not killed")
    need(box.commands.kill(2**22) is False, "killed a process that is none")
    with contextlib.suppress(CommandExitException):
        command.wait()


@check
def stdin(box):
    command = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(command.pid, "words\n")
    if hasattr(box.commands, "close_stdin"):
        box.commands.close_stdin(command.pid)
        need(command.wait().stdout == "words\n", "cat")
    else:
        command.kill()


@check
def reconnect(box):
    command = box.commands.run("sleep 1; echo late; exit 0", background=True)
    command.disconnect()
    need(box.commands.connect(command.pid).wait().stdout == "late\n", "late output")


@check
def time_limit_ends_the_group(box):
    started = time.monotonic()
    try:
        box.commands.run("sleep 3977 & sleep 3977", timeout=1)
    except TimeoutException:
        pass
    else:
        raise AssertionError("no timeout")
    need(time.monotonic() - started < 10, "late")
    time.sleep(0.5)
    left = box.commands.run("grep -l 397[7] /proc/[0-9]*/cmdline 2>/dev/null | wc -l").stdout
    need(left.strip() == "0", f"left: {left}")


@check
def files(box):
    box.files.write("folder/a.txt", "text")
    need(box.files.read("folder/a.txt") == "text", "read")
    box.files.write("b.bin", b"\0\1\2")
    need(bytes(box.files.read("b.bin", format="bytes")) == b"\0\1\2", "bytes")
    box.files.write_files([{"path": "m/1", "data": "one"}, {"path": "m/2", "data": "two"}])
    names = sorted(one.name for one in box.files.list("m"))
    need(names == ["1", "2"], names)
    need(box.files.exists("m/1") and not box.files.exists("m/3"), "exists")
    info = box.files.get_info("m/1")
    need(info.size == 3 and info.name == "1", info)
    box.files.rename("m/1", "m/9")
    box.files.remove("m/2")
    need([one.name for one in box.files.list("m")] == ["9"], "rename and remove")
    need(box.files.make_dir("new/deep") and not box.files.make_dir("new/deep"), "make_dir")
    try:
        box.files.read("nothing")
    except Exception as error:
        need("NotFound" in type(error).__name__, error)
    else:
        raise AssertionError("read nothing")


@check
def streamed_files(box):
    data = os.urandom(3_000_000)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        box.files.write("large", file)
    need(b"".join(box.files.read("large", format="stream")) == data, "large file")


@check
def signed_links(box):
    import urllib.request

    box.files.write("link.txt", "signed")
    url = box.download_url("link.txt", use_signature_expiration=60)
    need(urllib.request.urlopen(url, timeout=10).read() == b"signed", url)


@check
def watch(box):
    box.files.make_dir("watched")
    handle = box.files.watch_dir("watched")
    box.files.write("watched/new", "x")
    deadline, seen = time.monotonic() + 5, []
    while time.monotonic() < deadline and "new" not in [event.name for event in seen]:
        seen += handle.get_new_events()
    need("new" in [event.name for event in seen], seen)
    handle.stop()


@check
def terminal(box):
    from e2b import PtySize

    heard = []
    pty = box.pty.create(PtySize(rows=24, cols=80))
    box.pty.resize(pty.pid, PtySize(rows=30, cols=100))
    box.pty.send_stdin(pty.pid, b"stty size; exit\n")
    with contextlib.suppress(CommandExitException):
        pty.wait(on_pty=heard.append)
    text = b"".join(heard).decode()
    need("24 80" in text or "30 100" in text, text)


@check
def listing_and_metadata(box):
    from e2b import SandboxQuery

    found = []
    paginator = Sandbox.list(query=SandboxQuery(metadata={"check": "list"}), limit=1)
    while paginator.has_next:
        found += paginator.next_items()
    need(box.sandbox_id in [one.sandbox_id for one in found], found)
    need(box.get_info().metadata == {"check": "list"}, box.get_info())


@check
def timeout_and_metrics(box):
    before = box.get_info().end_at
    box.set_timeout(900)
    need((box.get_info().end_at - before).total_seconds() > 200, "end_at")
    box.get_metrics()
    need(box.is_running(), "is_running")


@check
def pause_and_connect(box):
    pause = box.pause if hasattr(box, "pause") else box.beta_pause
    command = box.commands.run("sleep 100", background=True)
    pause()
    need(str(box.get_info().state).endswith(("paused", "PAUSED")), box.get_info().state)
    again = Sandbox.connect(box.sandbox_id, timeout=300)
    need(again.commands.run("echo back").stdout == "back\n", "after resume")
    need(command.pid in [one.pid for one in again.commands.list()], "a process did not survive the pause")


@check
def fork(box):
    box.commands.run("echo parent > /tmp/state")
    children = box.fork(count=2, timeout=120)
    for child in children:
        if isinstance(child, Exception):
            raise child
        need(child.commands.run("cat /tmp/state").stdout == "parent\n", "child's files")
        child.commands.run("echo child > /tmp/state")
    need(box.commands.run("cat /tmp/state").stdout == "parent\n", "parent's files")
    for child in children:
        child.kill()


@check
def snapshot(box):
    box.commands.run("echo kept > ~/kept")
    made = box.create_snapshot()
    box.commands.run("echo changed > ~/kept")
    fresh = Sandbox.create(made.snapshot_id, timeout=120)
    need(fresh.commands.run("cat ~/kept").stdout == "kept\n", "snapshot's files")
    fresh.kill()


@check
def network_update(box):
    if hasattr(box, "update_network"):
        box.update_network({"allow_out": ["192.0.2.7"]})


@check
def template_with_copy(box):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data.txt").write_text("copied\n")
        template = (
            Template(file_context_path=folder).from_template("base").copy("data.txt", "/opt/data.txt")
            .set_envs({"BUILT": "yes"}).run_cmd("cat /opt/data.txt > /tmp/built")
        )  # fmt: skip
        logs = []
        Template.build(template, "check-template:v1", on_build_logs=lambda entry: logs.append(entry.message))
    fresh = Sandbox.create("check-template:v1", timeout=120)
    need(fresh.commands.run("cat /opt/data.txt /tmp/built; echo $BUILT").stdout == "copied\ncopied\nyes\n", logs)
    fresh.kill()


@check
def code_interpreter(box):
    from e2b_code_interpreter import Sandbox as Interpreter

    inner = Interpreter.create(timeout=120)
    try:
        inner.run_code("x = 41")
        done = inner.run_code("print('said'); x + 1")
        need(done.text == "42" and done.logs.stdout == ["said\n"], done)
        need(inner.run_code("1 / 0").error.name == "ZeroDivisionError", "error")
        context = inner.create_code_context(cwd="/tmp")
        need(inner.run_code("import os; os.getcwd()", context=context).text == "'/tmp'", "context")
        html = "class H:\n  def _repr_html_(self): return '<b>h</b>'\nH()"
        need(inner.run_code(html).results[0].html == "<b>h</b>", "html")
    finally:
        inner.kill()


@check
def kill(box):
    need(box.kill() is True, "kill")
    need(not box.is_running(), "is running after kill")
    need(box.kill() is False, "killed twice")


def main():
    wanted = set(sys.argv[1:])
    box = Sandbox.create(timeout=300, metadata={"check": "list"}, envs={"OTHER": "fixed"})
    results = {}
    for one in CHECKS:
        if wanted and one.__name__ not in wanted and one.__name__ != "kill":
            continue
        try:
            one(box)
            results[one.__name__] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[one.__name__] = f"{type(error).__name__}: {error}"[:400]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
