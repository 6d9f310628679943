"""One box at an E2B-compatible service: calls, standing still, snapshots, its end.

Owns: the translation of calls into commands and files of the SDK, deadlines in the box's running time (kept here, so
that they stand still while it is paused), and that nothing is sent twice. Output arrives as text: bytes that are no
UTF-8 come as replacement characters; files are exact. Invariant: after a lost connection the box is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shlex
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.core.boxes import NetworkPolicy, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import HOME, Box, Call, CallKind, Outcome, Start, Usage
from tandem.sandbox.backends.remote_errors import e2b, errno_of, remote_errors
from tandem.sandbox.backends.remote_files import script_of
from tandem.sandbox.backends.remote_frozen import Forget, RemoteFrozen
from tandem.sandbox.backends.remote_process import RemoteProcess
from tandem.sandbox.network.attempts import Tell
from tandem.sandbox.network.budget import Budget

KILL_TIMEOUT_S = 15.0
STDIN_PART = 64 * 1024


@dataclass(slots=True)
class _Kept:
    """Output of a call, up to its caps."""

    call: Call
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def on_stdout(self, text: str) -> None:
        self._take(self.stdout, self.call.stdout_cap_bytes, text, self.call.on_stdout)

    def on_stderr(self, text: str) -> None:
        self._take(self.stderr, self.call.stderr_cap_bytes, text, self.call.on_stderr)

    def _take(self, kept: bytearray, cap: int, text: str, listener: Any) -> None:
        data = text.encode("utf-8", "surrogateescape")
        part = data[: max(0, cap - len(kept))]
        self.dropped += len(data) - len(part)
        kept += part
        if listener is not None and part:
            try:
                listener(part)
            except Exception as error:  # the caller's code: its fault ends its call, not the box
                raise SandboxError(f"an output listener raised {type(error).__name__}: {error}") from error


class RemoteBox:
    """``made`` is the SDK's box; ``marks`` a folder for what stands for its snapshots, ``forget`` deletes one."""

    handle = ""

    def __init__(self, made: Any, spec: SandboxSpec, marks: Path, forget: Forget) -> None:
        self._made = made
        self._forget = forget
        self._spec = spec
        self._marks = marks
        self._limits: dict[asyncio.Timeout, float] = {}  # of calls; what is left of them while it is paused
        self._processes: set[RemoteProcess] = set()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """Its name at the service."""
        return self._made.sandbox_id

    async def prepare(self) -> None:
        """Give it the home folder that every box has; also the proof that it answers."""
        made = await self._shell(f"[ -w {HOME} ] || exit 9", timeout_s=10)
        if made.code == 9:
            user = (await self._shell("id -un", timeout_s=10)).stdout.decode("utf-8", "replace").strip()
            line = f"mkdir -p {HOME} && chown {shlex.quote(user)}: {HOME}"
            made = await self._shell(line, timeout_s=10, user="root")
        if made.code != 0:
            raise SandboxError(f"box {self.id} has no home folder: {made.stderr.decode('utf-8', 'replace')}")

    async def call(self, call: Call) -> Outcome:
        self._require()
        started = self._clock()
        if call.kind is CallKind.READ or call.kind is CallKind.WRITE:
            code, stdout, dropped = await self._move_file(call)
            return _outcome(code, stdout, b"", dropped, self._clock() - started)
        if call.kind is CallKind.RUN:
            line = f"cd -- {shlex.quote(call.folder)} || exit 126\n{shlex.join(call.arguments)}\nexit $?"
            return await self._run(line, call)
        outcome = await self._run(script_of(call), call)
        if outcome.code in (None, 0):
            return outcome
        number = errno_of(outcome.stderr.decode("utf-8", "replace"))
        return _outcome(number, outcome.stdout, outcome.stderr, outcome.dropped_bytes, outcome.duration_s)

    async def start(self, start: Start) -> RemoteProcess:
        self._require()
        if start.terminal is not None:
            raise refuse("remote", Ability.TERMINAL)
        if start.kind is not CallKind.RUN:
            raise refuse("remote", Ability.FILE_STREAMS)
        line = shlex.join(start.arguments)
        await self._look_up(start)
        process = RemoteProcess(start, lambda: SandboxGone(f"box {self.id} is gone", hint="create a new one"))
        with remote_errors(f"box {self.id}: starting {start.arguments[0]!r}", lost=self._lost):
            handle = await self._made.commands.run(
                f"cd -- {shlex.quote(start.folder)} && exec {line}", background=True, envs=dict(start.environment),
                user="root" if start.user == "root" else None, stdin=start.stdin, timeout=0, retain_output=False,
                on_stdout=lambda text: process.on_text("stdout", text),
                on_stderr=lambda text: process.on_text("stderr", text),
            )  # fmt: skip
        process.follow(handle, self._made.commands, self._watched, self._within, self._lost)
        self._processes.add(process)
        process.over.add_done_callback(lambda _: self._processes.discard(process))
        return process

    async def pause(self, *, cold: bool = False) -> None:
        self._require()
        if cold:
            raise refuse("remote", Ability.COLD_PAUSE)
        if self._paused_at is not None:
            return
        with remote_errors(f"box {self.id}: pausing", lost=self._lost):
            await self._made.pause()
        now = asyncio.get_running_loop().time()
        self._paused_at = time.monotonic()
        for limit in self._limits:
            when = limit.when()
            self._limits[limit] = 0.0 if when is None else when - now
            limit.reschedule(None)

    async def resume(self) -> None:
        self._require()
        if self._paused_at is None:
            return
        with remote_errors(f"box {self.id}: resuming", lost=self._lost):
            await self._made.connect(timeout=max(1, round(self._spec.limits.lifetime_s)))
        self._paused_s += time.monotonic() - self._paused_at
        self._paused_at = None
        for limit, left_s in self._limits.items():
            limit.reschedule(asyncio.get_running_loop().time() + left_s)

    async def snapshot(self, *, live: bool = False) -> RemoteFrozen:
        self._require()
        if live:
            raise refuse("remote", Ability.LIVE_SNAPSHOT)
        with remote_errors(f"box {self.id}: its snapshot", lost=self._lost):
            made = await self._made.create_snapshot()
        return RemoteFrozen(made.snapshot_id, self._marks, self._forget)

    async def fork(self, specs: Sequence[SandboxSpec], *, timeout_s: float) -> list[Box | Exception]:
        raise refuse("remote", Ability.LIVE_FORK)

    async def set_network(self, policy: NetworkPolicy, tell: Tell, budget: Budget | None = None) -> None:
        self._require()
        if not policy.none:
            raise refuse("remote", Ability.NETWORK)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raise refuse("remote", Ability.PORTS)

    async def usage(self) -> Usage:
        """The service's newest sample; it may have none."""
        self._require()
        with remote_errors(f"box {self.id}: its metrics", lost=self._lost):
            samples = await self._made.get_metrics()
        if not samples:
            return Usage()
        last = samples[-1]
        return Usage(memory_bytes=last.mem_used, disk_bytes=last.disk_used, disk_total_bytes=last.disk_total)

    async def kill(self) -> None:
        """Raises SandboxTimeout: the service does not answer; it ends the box by its lifetime."""
        if self.gone.done():
            return
        why = "killed"
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._made.kill()
        except Exception as error:
            why = f"given up: its service did not confirm its end ({type(error).__name__}: {error})"
            raise SandboxTimeout(f"box {self.id} is {why}", hint="it ends by its lifetime") from error
        finally:
            self._end(why)

    # ---- how

    async def _run(self, line: str, call: Call, *, user: str | None = None) -> Outcome:
        kept, started = _Kept(call), self._clock()
        what = f"box {self.id}: running {call.arguments[0]!r}"
        with remote_errors(what, lost=self._lost):
            handle = await self._made.commands.run(
                line, background=True, envs=dict(call.environment), user=user, stdin=bool(call.stdin), timeout=0,
                retain_output=False, on_stdout=kept.on_stdout, on_stderr=kept.on_stderr,
            )  # fmt: skip
        code, feeding = None, asyncio.ensure_future(self._feed(handle, call.stdin))
        try:
            async with self._within(call.timeout_s):
                with remote_errors(what, lost=self._lost):
                    code = await self._watched(handle)
        except TimeoutError:
            await self._stop(handle)
        except BaseException:
            if not self.gone.done():
                await asyncio.shield(self._stop(handle))
            raise
        finally:
            feeding.cancel()
        return _outcome(code, bytes(kept.stdout), bytes(kept.stderr), kept.dropped, self._clock() - started)

    async def _shell(
        self, line: str, *, timeout_s: float, user: str | None = None, environment: dict[str, str] | None = None
    ) -> Outcome:
        call = Call(arguments=[line], timeout_s=timeout_s, stdout_cap_bytes=4096, stderr_cap_bytes=4096,
                    environment=environment or {})  # fmt: skip
        return await self._run(line, call, user=user)

    async def _watched(self, handle: Any) -> int:
        """The command's exit code, when it ends. A box that dies meanwhile raises."""
        waiting = asyncio.ensure_future(handle.wait())
        try:
            await asyncio.wait({waiting, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise SandboxGone(f"box {self.id} is gone: {self.gone.result()}", hint="create a new one")
            return waiting.result().exit_code
        except e2b().CommandExitException as end:
            return end.exit_code if end.exit_code >= 0 else 128 + signal.SIGKILL
        finally:
            waiting.cancel()

    async def _feed(self, handle: Any, data: bytes) -> None:
        """A command that ended or closed its input takes no more: as in a shell's pipe."""
        if data:
            with contextlib.suppress(Exception):
                for start in range(0, len(data), STDIN_PART):
                    await self._made.commands.send_stdin(handle.pid, data[start : start + STDIN_PART])
                await self._made.commands.close_stdin(handle.pid)

    async def _stop(self, handle: Any) -> None:
        with remote_errors(f"box {self.id}: ending a command", lost=self._lost):
            await handle.kill()
            await handle.disconnect()

    async def _look_up(self, start: Start) -> None:
        name = shlex.quote(start.arguments[0])
        found = await self._shell(
            f"cd -- {shlex.quote(start.folder)} || exit 2; type -P -- {name} >&2 && exit 0; [ -e {name} ] && exit 13; "
            "exit 2", timeout_s=10, environment=dict(start.environment),
        )  # fmt: skip
        if found.code:
            number = errno.EACCES if found.code == errno.EACCES else errno.ENOENT
            raise OSError(number, f"box {self.id} cannot start it", start.arguments[0])

    async def _move_file(self, call: Call) -> tuple[int, bytes, int]:
        path, cap = call.arguments[0], call.stdout_cap_bytes
        told = e2b().exceptions
        try:
            async with asyncio.timeout(call.timeout_s):
                with remote_errors(f"box {self.id}: {path}", lost=self._lost):
                    try:
                        if call.kind is CallKind.WRITE:
                            await self._made.files.write(path, call.stdin)
                            return 0, b"", 0
                        if (await self._made.files.get_info(path)).size > cap:
                            return errno.EFBIG, b"", 0
                        data = bytes(await self._made.files.read(path, format="bytes"))
                        return 0, data[:cap], max(0, len(data) - cap)
                    except told.SandboxNotFoundException:
                        raise
                    except told.NotFoundException:
                        return errno.ENOENT, b"", 0
                    except told.NotEnoughSpaceException:
                        return errno.ENOSPC, b"", 0
                    except (told.TimeoutException, told.RateLimitException):
                        raise
                    except told.SandboxException as error:
                        return errno_of(str(error)), b"", 0
        except TimeoutError as error:
            raise SandboxTimeout(f"box {self.id}: {path} was not moved in {call.timeout_s:g} s") from error

    @contextlib.asynccontextmanager
    async def _within(self, seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(None if self._paused_at is not None else seconds) as limit:
            self._limits[limit] = seconds
            try:
                yield
            finally:
                del self._limits[limit]

    def _clock(self) -> float:
        """Seconds of the box's running time."""
        now = time.monotonic() if self._paused_at is None else self._paused_at
        return now - self._paused_s

    def _require(self) -> None:
        if self.gone.done():
            raise SandboxGone(f"box {self.id} is gone: {self.gone.result()}", hint="create a new one")

    def _lost(self, why: str) -> None:
        """Given up. Its service is told once, in case it hears."""
        if not self.gone.done():
            self._end(why)
            task = asyncio.ensure_future(self._tell_end())
            _TELLING.add(task)
            task.add_done_callback(_TELLING.discard)

    async def _tell_end(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._made.kill()

    def _end(self, why: str) -> None:
        if not self.gone.done():
            self.gone.set_result(why)
        for process in list(self._processes):
            process.on_gone()


_TELLING: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive


def _outcome(code: int | None, stdout: bytes, stderr: bytes, dropped: int, took_s: float) -> Outcome:
    return Outcome(code=code, stdout=stdout, stderr=stderr, dropped_bytes=dropped, timed_out=code is None, started=True,
                   oom_killed=False, duration_s=took_s)  # fmt: skip
