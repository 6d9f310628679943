"""Reward functions that the pool's tests run in worker processes."""

import ctypes
import itertools
import math
import sys
import time


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
