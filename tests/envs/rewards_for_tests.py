"""Reward functions that the pool's tests run in worker processes."""

import ctypes
import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path


def one(episode):
    return 1.0


def answer_is_right(episode, task):
    return episode.final_message == task.private["answer"]


async def async_one(task):
    return 1


def loops_in_python(episode):
    for _ in itertools.count():
        pass


def stuck_in_native_code(episode):
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter lock: no signal handler and no thread of it can run


def raises(episode):
    raise KeyError("no such answer")


def exits(episode):
    sys.exit(3)


def dies(episode):
    ctypes.string_at(0)


def no_verdict(episode):
    return None


def wrong_type(episode):
    return "good"


def not_a_number(episode):
    return math.nan


def prints(episode):
    print("x" * 100_000, flush=True)
    return 0.5


def slow(episode):
    time.sleep(0.3)
    return 0.25


def torch_is_loaded(episode):
    return "torch" in sys.modules


DAEMON = """
import os, sys, time
from pathlib import Path
if os.fork():
    os._exit(0)
os.setsid()
Path(sys.argv[1], str(os.getpid())).touch()
if not os.fork():
    os.setsid()
    Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(600)
"""


def starts_daemons(episode, task):
    """Two processes that leave session and parent behind; then it ends as the task says."""
    folder = Path(task.private["folder"])
    subprocess.run([sys.executable, "-S", "-c", DAEMON, str(folder)], check=True)
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    if task.private["end"] == "timeout":
        time.sleep(600)
    if task.private["end"] == "death":
        os._exit(7)
    return 1.0
