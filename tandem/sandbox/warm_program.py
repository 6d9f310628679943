"""Runs in a box as ``python3 -c`` with the names of modules: imports them once, then runs Python commands as forks.

Standard library only. One JSON object a line on stdin: ``{"id", "argv", "cwd", "env", "stdin", "cap", "timeout_s"}``
(stdin in base64); on stdout the same way ``ready`` and, per command, ``out`` with a part of its output and ``end``. One
thread, and no open file between commands, so that a live fork can copy it.
"""

import base64
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback

PART = 48 * 1024


def say(**event):
    data = memoryview(json.dumps(event).encode() + b"\n")
    while data:
        data = data[os.write(1, data):]


def behave_as(argv):
    """What ``python3 argv...`` does, from here on. Returns its exit code."""
    try:
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.path.insert(0, "")
            space = {"__name__": "__main__", "__builtins__": __builtins__}
            exec(compile(argv[1], "<string>", "exec"), space)
        elif argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def be_child(asked, out, err):
    os.setsid()
    given = os.memfd_create("stdin")
    os.write(given, base64.b64decode(asked["stdin"])) if asked["stdin"] else None
    os.lseek(given, 0, os.SEEK_SET)
    for source, number in ((given, 0), (out, 1), (err, 2)):
        os.dup2(source, number)
    os.closerange(3, 4096)
    code = 1
    try:
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        for name in ("random", "numpy.random"):  # else every command draws what the last one drew
            if name in sys.modules:
                sys.modules[name].seed()
        code = behave_as(asked["argv"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Job:
    """A command that runs. ``streams``: what is still open of its output, by descriptor."""

    def __init__(self, asked):
        self.id, self.cap, self.timed_out, self.status = asked["id"], asked["cap"], False, None
        self.begun = time.monotonic()
        self.deadline = self.begun + asked["timeout_s"]
        self.sent = {"stdout": 0, "stderr": 0}
        self.dropped = 0
        out, err = os.pipe(), os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            be_child(asked, out[1], err[1])
        os.close(out[1])
        os.close(err[1])
        self.streams = {out[0]: "stdout", err[0]: "stderr"}
        self.handle = os.pidfd_open(self.pid)
        for descriptor in self.streams:
            os.set_blocking(descriptor, False)

    def read(self, descriptor):
        name = self.streams[descriptor]
        try:
            data = os.read(descriptor, PART)
        except BlockingIOError:
            return False
        if not data:
            os.close(descriptor)
            del self.streams[descriptor]
            return False
        kept = data[: max(0, self.cap - self.sent[name])]
        self.sent[name] += len(kept)
        self.dropped += len(data) - len(kept)
        if kept:
            say(kind="out", id=self.id, stream=name, data=base64.b64encode(kept).decode())
        return True

    def kill(self):
        self.timed_out, self.deadline = True, float("inf")
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)

    def end(self):
        """It has ended: what its pipes hold now is the last that counts; survivors may hold them open."""
        self.status = os.waitpid(self.pid, 0)[1]
        for descriptor in list(self.streams):
            while descriptor in self.streams and self.read(descriptor):
                pass
        for descriptor in (*self.streams, self.handle):
            os.close(descriptor)
        code = os.waitstatus_to_exitcode(self.status)
        say(kind="end", id=self.id, code=None if self.timed_out else code if code >= 0 else 128 - code,
            timed_out=self.timed_out, dropped=self.dropped, took_s=time.monotonic() - self.begun)


def main(modules):
    begun = time.monotonic()
    for name in modules:
        importlib.import_module(name)
    say(kind="ready", threads=len(os.listdir("/proc/self/task")), took_s=time.monotonic() - begun)
    jobs, held = [], b""
    while True:
        wait_s = min((job.deadline for job in jobs), default=float("inf")) - time.monotonic()
        watched = [0, *(number for job in jobs for number in (*job.streams, job.handle))]
        ready = select.select(watched, [], [], None if wait_s == float("inf") else max(0.0, wait_s))[0]
        for job in list(jobs):
            for descriptor in list(job.streams):
                if descriptor in ready:
                    job.read(descriptor)
            if job.handle in ready:
                jobs.remove(job)
                job.end()
            elif job.deadline <= time.monotonic():
                job.kill()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, held = (held + data).split(b"\n")
            jobs += [Job(json.loads(line)) for line in lines]


if __name__ == "__main__":
    main(sys.argv[1:])
