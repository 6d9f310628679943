"""The process of a rank other than 0: does what rank 0 says, and is gone when rank 0 is.

Owns: this process. Refuses: every decision. Invariants: the end of the socket ends the process at once, in the middle
of a computation too, so no rank outlives the run; what fails here is told to rank 0 before the process ends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tandem.core.errors import EngineError
from tandem.engine.memory import keep_freed_memory
from tandem.engine.train.parallel import Shard
from tandem.engine.train.rank_messages import Answer, Build, Command, Gather, Join, Learn, Ping, Pong, Restore, Score

LOOPBACK = "127.0.0.1"


def main(descriptor: int) -> None:
    """Serve commands from the socket ``descriptor`` until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; rank 0 decides what it means
    keep_freed_memory()
    _Worker(Connection(descriptor)).serve()


class _Worker:
    def __init__(self, line: Connection) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._device = torch.device("cpu")
        self._shard: Shard | None = None

    def serve(self) -> None:
        threading.Thread(target=self._hear, daemon=True).start()
        while True:
            command = self._commands.get()
            try:
                answer = self._do(command)
            except BaseException as error:  # a supervisor: rank 0 hears of everything
                with contextlib.suppress(OSError):
                    self._say(Answer(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}", fatal=True))
                os._exit(1)
            self._say(answer)

    def _hear(self) -> None:
        while True:
            try:
                command = self._line.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(command, Ping):
                self._say(Pong())
            else:
                self._commands.put(command)

    def _say(self, answer: Answer | Pong) -> None:
        with self._sending:
            self._line.send(answer)

    def _do(self, command: Command) -> Answer:
        match command:
            case Join():
                self._device = join(command)
            case Build():
                self._shard = None
                self._shard = Shard(command.setup, self._device)
                self._shard.fill(None)
            case Learn():
                return self._learn(self._built, command)
            case Score():
                return self._score(self._built, command)
            case Gather():
                optimizer = self._built.optimizer
                for _ in optimizer.each_moment() if command.moments else optimizer.each_weight():
                    pass  # rank 0 keeps them; here each is let go before the next one comes
            case Restore():
                self._built.restore(None, None, with_moments=command.moments)
        return Answer()

    def _learn(self, shard: Shard, command: Learn) -> Answer:
        shard.optimizer.discard()
        measured = []
        for place, row in command.rows:
            values = shard.learn(row, command.step)
            if values is not None:
                measured.append((place, values.tolist()))
        try:
            shard.update(command.rate)
        except EngineError as error:  # all ranks come to it together: nobody waits for anybody
            return Answer(error=error.message)
        shard.publish(None)
        return Answer(measured=tuple(measured))

    def _score(self, shard: Shard, command: Score) -> Answer:
        scores = tuple(shard.score(batch) for batch in command.batches)
        shard.settle()
        return Answer(scores=scores)

    @property
    def _built(self) -> Shard:
        assert self._shard is not None, "no Build came before"
        return self._shard


def join(command: Join, store: TCPStore | None = None) -> torch.device:
    """Meet the other ranks; returns the device of this one. Rank 0 brings the store that the others find."""
    torch.set_num_threads(command.threads)
    device = torch.device("cpu") if command.device == "cpu" else torch.device(command.device, command.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=command.timeout_s)
    store = store or TCPStore(LOOPBACK, command.port, is_master=False, timeout=timeout)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(
        backend, store=store, rank=command.rank, world_size=command.num_ranks, timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )  # fmt: skip
    return device
