"""The process in which reward functions run: ``python -m tandem.envs.reward_worker``, driven by ``reward_pool``.

Reads frames from standard input and answers on what was standard output; the functions' own prints go nowhere.
Works below a guard (``reward_guard``), which ends it and all it started. Must import light: it is started many times.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable

import msgspec

from tandem.core import wire
from tandem.core.errors import RewardError
from tandem.core.registry import Registry
from tandem.core.types import Episode, Task
from tandem.envs.foreign import describe
from tandem.envs.reward import number_of
from tandem.envs.reward_box import Ask, BoxReply, BoxRequest, RemoteBox
from tandem.envs.reward_guard import guarded
from tandem.envs.reward_pool import Answer, Call, Greeting


def main() -> None:
    if not guarded():
        return
    frames_in, frames_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)

    def receive() -> bytes | None:
        head = frames_in.read(4)
        return frames_in.read(int.from_bytes(head, "little")) if len(head) == 4 else None

    def send(frame: bytes) -> None:
        frames_out.write(len(frame).to_bytes(4, "little") + frame)
        frames_out.flush()

    first = receive()
    if first is None:
        return
    greeting = msgspec.msgpack.decode(first, type=Greeting)
    sys.path[:] = greeting.path
    registry = Registry("reward", {})
    for reference in greeting.preload:
        try:
            registry.resolve(reference)
        except Exception:  # a supervisor: the call that needs it will say what is wrong
            continue
    send(b"ready")

    def ask(request: BoxRequest) -> BoxReply:
        send(msgspec.msgpack.encode(request))
        frame = receive()
        if frame is None:
            raise SystemExit("the parent is gone")
        return msgspec.msgpack.decode(frame, type=BoxReply)

    while (frame := receive()) is not None:
        send(msgspec.msgpack.encode(_answer(registry, msgspec.msgpack.decode(frame, type=Call), ask)))


def _answer(registry: Registry, call: Call, ask: Ask) -> Answer:
    try:
        function = registry.resolve(call.reference)
        if not callable(function):
            return Answer(error=f"{call.reference} is not a function")
        available: dict[str, object] = {
            "episode": wire.decode(call.episode, Episode),
            "task": wire.decode(call.task, Task),
        }
        if call.box is not None:
            available["box"] = RemoteBox(call.box, ask)
        return Answer(value=number_of(_call(function, available)))
    except RewardError as error:
        return Answer(error=error.message)
    except BaseException as error:  # a supervisor: exit() in a reward is the reward's failure, not ours
        return Answer(error=describe(error))


def _call(function: Callable[..., object], available: dict[str, object]) -> object:
    answer = function(**{name: available[name] for name in inspect.signature(function).parameters})
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


if __name__ == "__main__":
    main()
