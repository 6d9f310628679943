"""One live box as its user sees it: commands and files.

Owns: the public face (core's ``Sandbox``), the box's lifecycle, and the translation of outcomes into results.
Refuses: calls on a box that is not running. File operations run inside the box as its user, so a path can lead
to nothing that a command could not reach.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tandem.core.boxes import ExecResult, SandboxSpec, SandboxState
from tandem.core.errors import RecordError, SandboxError, SandboxGone
from tandem.sandbox.backend import HOME, Box, Call, CallKind, Carrier, Outcome, Process, Start
from tandem.sandbox.lifecycle import Lifecycle

FILE_TIMEOUT_S = 30.0
LIST_MAX_BYTES = 4 * 2**20


class Commands:
    """Runs commands in one box."""

    def __init__(self, session: Session) -> None:
        self._session = session

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
        """Run a command (a string goes through ``/bin/sh -c``) in the home folder or ``cwd``.

        What it leaves running in the background goes on until the box ends; at its deadline all of it dies.

        Raises:
            ValueError: no command, or a NUL in it (the caller's mistake, often a model's; the box is well).
        """
        arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not arguments:
            raise ValueError("an empty command")
        _refuse_nul(*arguments, cwd or "", *(environment or {}), *(environment or {}).values())
        kept = self._session.spec.limits.output_bytes
        outcome = await self._session.call(Call(
            arguments=arguments,
            timeout_s=timeout_s,
            folder=_absolute(cwd or HOME),
            environment=environment or {},
            stdin=stdin,
            stdout_cap_bytes=kept,
            stderr_cap_bytes=kept,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        ))
        return ExecResult(
            exit_code=outcome.code,
            stdout=outcome.stdout.decode("utf-8", "replace"),
            stderr=outcome.stderr.decode("utf-8", "replace"),
            truncated=outcome.dropped_bytes > 0,
            dropped_bytes=outcome.dropped_bytes,
            timed_out=outcome.timed_out,
            oom_killed=outcome.oom_killed,
            duration_s=outcome.duration_s,
        )


    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """A long-lived command with an open stdin: an interpreter, a shell, a server. ``timeout_s`` is the life of its
        whole process group (None: until it ends or the box does).

        Raises:
            ValueError: as ``run``. OSError: not found, not executable. SandboxUnavailable: the backend has none.
        """
        arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if not arguments:
            raise ValueError("an empty command")
        _refuse_nul(*arguments, cwd or "", *(environment or {}), *(environment or {}).values())
        box = await self._session.use()
        return await box.start(Start(
            arguments=arguments, folder=_absolute(cwd or HOME), environment=environment or {}, timeout_s=timeout_s,
            stdin=True,
        ))

    @property
    def carried(self) -> Process | None:
        """The running command that the live fork which made this box copied; its streams are its own. None: the box
        was made in another way."""
        box = self._session.box
        return box.carried if isinstance(box, Carrier) else None


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a box: ``mode`` with its type bits (see ``stat``), sizes in bytes, ``target`` of a link."""

    path: str
    mode: int
    uid: int
    gid: int
    size_bytes: int
    modified_ns: int
    target: str


class Files:
    """Reads and writes files of one box. Relative paths start in the home folder; a path with a NUL is a
    ``ValueError``, as everywhere in Python."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, making its folders.

        Raises:
            PermissionError, IsADirectoryError, OSError (disk full): as in any file system.
        """
        raw = data.encode() if isinstance(data, str) else data
        await self._operate(CallKind.WRITE, path, stdin=raw, cap=0)

    async def read(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
        """Raises ``FileNotFoundError`` and its kin, or ``SandboxError`` when the file is larger than ``max_bytes``."""
        outcome = await self._operate(CallKind.READ, path, cap=max_bytes)
        if outcome.dropped_bytes:
            raise self._too_large(path, max_bytes)
        return outcome.stdout

    async def list(self, path: str) -> list[str]:
        """The sorted names in a folder."""
        outcome = await self._operate(CallKind.LIST, path, cap=LIST_MAX_BYTES)
        if outcome.dropped_bytes:
            raise self._too_large(path, LIST_MAX_BYTES)
        return sorted(name.decode("utf-8", "surrogateescape") for name in outcome.stdout.split(b"\0") if name)

    async def stat(self, path: str) -> Entry:
        """Of the name itself: a link is not followed. Raises FileNotFoundError and its kin."""
        (entry,) = read_entries((await self._operate(CallKind.STAT, path, cap=LIST_MAX_BYTES)).stdout)
        return entry

    async def entries(self, path: str, *, depth: int = 1) -> list[Entry]:
        """What a folder holds, to ``depth`` levels, sorted by path; no link below it is followed."""
        outcome = await self._operate(CallKind.ENTRIES, path, str(depth), cap=LIST_MAX_BYTES)
        if outcome.dropped_bytes:
            raise self._too_large(path, LIST_MAX_BYTES)
        return sorted(read_entries(outcome.stdout), key=lambda entry: entry.path)

    async def make_folder(self, path: str) -> None:
        """With its parents. Raises FileExistsError."""
        await self._operate(CallKind.MAKE_FOLDER, path, cap=0)

    async def move(self, path: str, to: str) -> None:
        """Rename, making the folders of ``to``; a file that is there is replaced."""
        _refuse_nul(to)
        await self._operate(CallKind.MOVE, path, _absolute(to), cap=0)

    async def remove(self, path: str) -> None:
        """With all below it; of a link the link only."""
        await self._operate(CallKind.REMOVE, path, cap=0)

    async def _operate(self, kind: CallKind, path: str, *more: str, cap: int, stdin: bytes = b"") -> Outcome:
        _refuse_nul(path)
        outcome = await self._session.call(Call(
            kind=kind, arguments=[_absolute(path), *more], timeout_s=FILE_TIMEOUT_S, folder="/", stdin=stdin,
            stdout_cap_bytes=cap, stderr_cap_bytes=4096,
        ))
        if outcome.code == 0:
            return outcome
        if kind is CallKind.READ and outcome.code == errno.EFBIG:
            raise self._too_large(path, cap)
        what = f"sandbox {self._session.id}: {kind.name.lower()} of {path}"
        if outcome.code is None:
            raise SandboxError(f"{what} was not done in {FILE_TIMEOUT_S:g} s")
        if not outcome.started or outcome.code > 128:
            raise SandboxError(f"{what} failed with code {outcome.code}: {outcome.stderr.decode('utf-8', 'replace')}")
        raise OSError(outcome.code, os.strerror(outcome.code), path)  # Python picks FileNotFoundError and its kin

    def _too_large(self, path: str, max_bytes: int) -> SandboxError:
        return SandboxError(f"sandbox {self._session.id}: {path} is larger than {max_bytes} bytes")


class Session:
    """One live box with an identity."""

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        box: Box | None,
        *,
        on_end: Callable[[Session, str], None],
        on_use: Callable[[], Awaitable[None]] | None = None,
        on_kill: Callable[[], None] | None = None,
        paused: bool = False,
    ) -> None:
        """``on_end`` hears of the box's end: why, if nobody killed it, else an empty string. ``on_use`` is asked to
        make a paused box run before it is used; without it using one is refused. ``on_kill`` makes the move to
        ``KILLING``, so that it is known before it begins. ``paused``: it is found at rest so, and without ``box``
        only its files exist."""
        self.id = sandbox_id
        self.spec = spec
        self.commands = Commands(self)
        self.files = Files(self)
        self.lifecycle = Lifecycle(sandbox_id)
        self._box: Box | None = None
        self._on_end = on_end
        self._on_use = on_use
        self._on_kill = on_kill or (lambda: self.lifecycle.move(SandboxState.KILLING))
        self._reason = ""
        self.lifecycle.start(SandboxState.PAUSED if paused else SandboxState.RUNNING)
        self.bind(box)

    @property
    def state(self) -> SandboxState:
        return self.lifecycle.state

    @property
    def box(self) -> Box | None:
        """The backend's box; None while only its files exist."""
        return self._box

    def bind(self, box: Box | None) -> None:
        """Stand on this box from now on; None: its files are kept elsewhere, and its end is not the session's."""
        self._box = box
        if box is not None:
            box.gone.add_done_callback(lambda gone: self._box_gone(box, gone.result()))

    async def use(self) -> Box:
        """The backend's box, running: what every call, process and connection goes through.

        Raises:
            SandboxGone: it is dead. SandboxError: it is paused, and nothing resumes it by use.
        """
        if self.state is SandboxState.DEAD:
            raise SandboxGone(f"sandbox {self.id} is dead: {self._reason}", hint="create a new one")
        while self._on_use is not None and not self.lifecycle.usable:  # again when it was paused meanwhile
            await self._on_use()
        self.lifecycle.require_running()
        assert self._box is not None
        return self._box

    async def call(self, call: Call) -> Outcome:
        """What commands and files go through."""
        box = await self.use()
        try:
            return await box.call(call)
        except SandboxError as error:  # the backend does not know our name
            raise type(error)(f"sandbox {self.id}: {error.message}", hint=error.hint) from error

    async def kill(self) -> None:
        """Idempotent; after it nothing of the box is left."""
        if self.state is SandboxState.DEAD:
            return
        if self.state is not SandboxState.KILLING:
            self._on_kill()
        if self._box is not None:
            await self._box.kill()
        else:
            self._end("killed")

    def _box_gone(self, box: Box, reason: str) -> None:
        if box is self._box:
            with suppress(RecordError):  # nobody waits here: a log that is full tells whoever writes next
                self._end(reason)

    def _end(self, reason: str) -> None:
        if self.state is SandboxState.DEAD:
            return
        self._reason = reason
        lost = self.state is not SandboxState.KILLING
        self.lifecycle.move(SandboxState.DEAD)
        self._on_end(self, reason if lost else "")


def read_entries(listing: bytes) -> list[Entry]:
    """What a file operation of kind STAT or ENTRIES prints."""
    fields = listing.decode("utf-8", "surrogateescape").split("\0")[:-1]
    found = []
    for numbers, path, target in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        mode, uid, gid, size, seconds, nanoseconds = numbers.split(" ")
        modified_ns = int(seconds) * 10**9 + int(nanoseconds)
        found.append(Entry(path, int(mode, 8), int(uid), int(gid), int(size), modified_ns, target))
    return found


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}"


def _refuse_nul(*texts: str) -> None:
    """No system call takes one; refused here, so that it is never taken for a failure of the box."""
    for text in texts:
        if "\0" in text:
            raise ValueError(f"a NUL character in {text[:80]!r}")
