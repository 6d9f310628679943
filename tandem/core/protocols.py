"""The six seams. Everything that can be swapped meets the rest of the system here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from tandem.core.boxes import ExecResult, SandboxSpec, SandboxState
from tandem.core.events import AnyEvent
from tandem.core.types import (
    BatchPlan,
    Completion,
    EngineStats,
    Floats,
    GenerateRequest,
    Sampled,
    StepResult,
    Trajectory,
    WeightVersion,
)


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class EventSink(Protocol):
    def emit(self, event: AnyEvent, *, cause: int = -1) -> int:
        """Append a fact; returns its sequence number, to be used as the cause of what follows. Never blocks
        on I/O of a slow reader, never raises into the caller's work."""
        ...

    def put_blob(self, data: bytes) -> str:
        """Store bytes under their digest and return it."""
        ...


class TokenGuide(Protocol):
    """Which tokens may come next, of one answer. Stateful; used by one request."""

    def allowed(self) -> Iterable[bool]:
        """A flag for each token id (best as a NumPy array); at least one is set."""
        ...

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token."""
        ...


class TokenEngine(Protocol):
    """Inference: token ids in, token ids out."""

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: Callable[[Sampled], None] | None = None,
        guide: TokenGuide | None = None,
    ) -> Completion:
        """Run one request to its end. Cancelling the awaiting task aborts the request and frees its blocks.
        ``on_tokens`` hears each new token as it is made (for streaming); ``guide`` restricts what is sampled.

        Raises:
            PromptTooLong: prompt plus max_tokens does not fit; the message names both numbers.
            EngineError: the engine is closed or failed.
        """
        ...

    async def fork(
        self,
        request_id: str,
        forks: Mapping[str, int],
        *,
        at: int | None = None,
        on_tokens: Callable[[str, Sampled], None] | None = None,
        guides: Mapping[str, TokenGuide] | None = None,
    ) -> list[Completion]:
        """Let a running request's answer, cut at ``at`` tokens (None: all it has now), go on under each id of
        ``forks`` with its seed, each to its end; the request itself goes on. Nothing that was computed up to there is
        computed again: whole blocks are shared, what is in the last one is copied. Token t of a fork draws from (its
        seed, t), t counted from the start of the answer, so one with the parent's seed becomes the parent's answer.
        ``on_tokens`` hears a fork's id and its new tokens. Cancelling ends all of them.

        Raises:
            NotRunning: no such request is running.
            EngineError: its answer is shorter, or nothing can follow that token.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now; its ``generate`` returns what it has with finish reason ``abort``. Unknown ids
        are ignored."""
        ...

    async def sleep(self) -> None:
        """Give the memory of the KV cache back to the system, until the next request or version.

        Raises:
            EngineError: requests are in flight, or this engine does not sleep.
        """
        ...

    async def load(self, version: WeightVersion) -> None:
        """Serve ``version`` from the next engine step on; the prefix cache of other versions is not used."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class TrainEngine(Protocol):
    """Training: plans of samples in, numbers out. Blocking calls; the caller owns the thread."""

    async def step(self, plan: BatchPlan) -> StepResult:
        """Forward, loss, backward, optimizer for one plan."""
        ...

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Log-probability of every token under the current weights at the trajectory's temperature, one
        stream a trajectory (the first token has none: 0)."""
        ...

    async def publish(self) -> WeightVersion:
        """Make the current weights the next version."""
        ...

    async def close(self) -> None: ...


class WeightStore(Protocol):
    """Checkpoints on disk: atomic, verified, listed."""

    def begin(self, step: int, extra: Mapping[str, object]) -> Future[str]:
        """Take weights, optimizer, schedule, random state and ``extra`` as they are now, and write them while training
        goes on; the future gives the folder, or raises ``RecordError``. A write before it is waited for."""
        ...

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        ...

    def restore(self, step: int) -> Mapping[str, object]:
        """Load it all back; returns ``extra``."""
        ...

    def digest(self, step: int) -> str:
        """The one digest that names every byte of a complete checkpoint."""
        ...


class Commands(Protocol):
    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command (a string goes through ``/bin/sh -c``). At the deadline the whole process tree dies
        and the result says ``timed_out`` with the partial output. A non-zero exit is a value.

        Raises:
            SandboxGone: the box died. SandboxTimeout: the box itself does not answer.
        """
        ...


class Files(Protocol):
    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, making its folders."""
        ...

    async def read(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
        """Raises ``FileNotFoundError`` or ``SandboxError`` (too large)."""
        ...

    async def list(self, path: str) -> list[str]: ...


class Sandbox(Protocol):
    """One live box."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> SandboxState: ...
    @property
    def commands(self) -> Commands: ...
    @property
    def files(self) -> Files: ...

    async def kill(self) -> None:
        """Idempotent; after it nothing of the box is left."""
        ...


class SandboxService(Protocol):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Raises SandboxUnavailable (this machine cannot), SandboxError (it failed; may be retryable)."""
        ...

    async def close(self) -> None:
        """Kill all boxes of this service and wait until they are gone."""
        ...
