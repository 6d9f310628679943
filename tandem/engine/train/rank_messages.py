"""What rank 0 asks of the other ranks, and what they answer.

Owns: the messages. They travel pickled over a socket pair between a process and its own children, so no version and
no stranger comes in between. Every command but ``Ping`` has one ``Answer``, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.types import Floats, Sample, Trajectory
from tandem.engine.train.learner import Normaliser
from tandem.engine.train.parallel import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Meet the others at a store on the loopback interface, and compute with so many threads."""

    port: int
    rank: int
    num_ranks: int
    device: str  # cpu, or cuda: each rank takes the device of its number
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Make a shard and take its weights from rank 0; a shard from before is dropped."""

    setup: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """One step: the rows of this rank with their places in the plan; an empty one is a pass without samples."""

    step: Normaliser
    rows: tuple[tuple[int, tuple[Sample, ...]], ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Forward passes over batches of trajectories; an empty one is a pass without any."""

    batches: tuple[tuple[Trajectory, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Take part in the gathering of weights, or of moments."""

    moments: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Take weights, and moments if there are any, from rank 0."""

    moments: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Answered at once by a thread of its own, whatever the rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``error`` is empty, or what went wrong; ``fatal`` says that the rank is gone after it."""

    measured: tuple[tuple[int, list[float]], ...] = ()
    scores: tuple[list[Floats], ...] = ()
    error: str = ""
    fatal: bool = False


Command = Join | Build | Learn | Score | Gather | Restore | Ping
