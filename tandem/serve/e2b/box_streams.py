"""``BoxFiles`` by the box's own agent: nothing is needed in the box, and no path is followed on the host.

Owns: one long-lived file operation a verb (``Ability.FILE_STREAMS``), as the user that was asked for. Invariant: of a
file that is read no more is on its way than its reader takes; what was dropped of an answer is an error, not a gap.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import suppress

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import HOME, CallKind, Process, Start
from tandem.sandbox.session import Entry, read_entries
from tandem.serve.e2b.files import FileChange, FileInfo

FILE_S = 60.0
PARTS_AHEAD = 2  # of a file that is read, a MiB each
NAMES_BYTES = 2**20  # of a list of users that is looked at
KINDS = {"c": "create", "w": "write", "d": "remove", "m": "rename", "a": "chmod"}
Starter = Callable[[Start], Awaitable[Process]]


class StreamFiles:
    """``start`` starts a command or a file operation in the box of this id."""

    def __init__(self, sandbox_id: str, start: Starter) -> None:
        self._id, self._start = sandbox_id, start

    async def read(self, path: str, *, user: str) -> AsyncGenerator[bytes, None]:
        process = await self._begin(CallKind.READ_PARTS, path, user=user, stdin=True, timeout_s=None)
        parts = self._parts(process, path)
        try:  # so that what cannot be read is known before the first word of an answer
            first = await anext(parts)
        except StopAsyncIteration:
            first = b""
        return _with_first(first, parts)

    async def _parts(self, process: Process, path: str) -> AsyncGenerator[bytes, None]:
        try:
            await _ask(process, PARTS_AHEAD)
            taken = 0
            async for piece in process.output(from_start=True):
                if piece.lost_bytes:
                    raise SandboxError(f"sandbox {self._id}: {path} came faster than it was asked for")
                if piece.stream != "stdout":
                    continue
                yield piece.data
                before, taken = taken, taken + len(piece.data)
                await _ask(process, (taken >> 20) - (before >> 20))
            await self._well(process, path)
        finally:
            await _stop(process)

    async def write(self, path: str, parts: AsyncIterable[bytes], *, user: str) -> None:
        process = await self._begin(CallKind.WRITE, path, user=user, stdin=True, timeout_s=None)
        try:
            with suppress(SandboxError):  # it has ended before it had read all: its code says why
                async for part in parts:
                    await process.send_stdin(part)
                await process.close_stdin()
            await self._well(process, path)
        finally:
            await _stop(process)

    async def stat(self, path: str, *, user: str) -> FileInfo:
        entries = read_entries(await self._answer(CallKind.STAT, path, user=user))
        return (await self._named(entries))[0]

    async def entries(self, path: str, *, depth: int, user: str) -> list[FileInfo]:
        listing = await self._answer(CallKind.ENTRIES, path, str(depth), user=user)
        return await self._named(sorted(read_entries(listing), key=lambda entry: entry.path))

    async def make_folder(self, path: str, *, user: str) -> None:
        await self._answer(CallKind.MAKE_FOLDER, path, user=user)

    async def move(self, path: str, target: str, *, user: str) -> None:
        await self._answer(CallKind.MOVE, path, _absolute(target), user=user)

    async def remove(self, path: str, *, user: str) -> None:
        await self._answer(CallKind.REMOVE, path, user=user)

    async def watch(self, path: str, *, recursive: bool, user: str) -> AsyncGenerator[FileChange, None]:
        process = await self._begin(CallKind.WATCH, path, "1" if recursive else "0", user=user, stdin=True,
                                    timeout_s=None)  # fmt: skip
        changes = self._changes(process, _absolute(path))
        try:
            async with asyncio.timeout(FILE_S):
                await anext(changes, None)  # it watches
        except TimeoutError as error:
            await changes.aclose()
            raise SandboxError(f"sandbox {self._id}: {path} was not watched in {FILE_S:g} s") from error
        return changes

    async def _changes(self, process: Process, path: str) -> AsyncGenerator[FileChange, None]:
        held = b""
        try:
            async for piece in process.output(from_start=True):
                if piece.lost_bytes:
                    raise SandboxError(f"sandbox {self._id}: more changed in {path} than was listened to")
                *told, held = (held + piece.data).split(b"\0")
                for one in told:
                    changed = one[1:].decode("utf-8", "surrogateescape")
                    name = os.path.relpath(changed, path)
                    yield FileChange(path=changed, name=name, kind=KINDS.get(chr(one[0]), ""))
            await self._well(process, path)
        finally:
            await _stop(process)

    # ---- how

    async def _begin(
        self, kind: CallKind, path: str, *more: str, user: str, stdin: bool = False, timeout_s: float | None = FILE_S
    ) -> Process:
        for text in (path, *more):
            if "\0" in text:
                raise ValueError(f"a NUL character in {text[:80]!r}")
        return await self._start(Start(kind=kind, arguments=[_absolute(path), *more], folder="/", user=user,
                                       stdin=stdin, timeout_s=timeout_s))  # fmt: skip

    async def _answer(self, kind: CallKind, path: str, *more: str, user: str) -> bytes:
        process = await self._begin(kind, path, *more, user=user)
        kept = bytearray()
        try:
            async for piece in process.output(from_start=True):
                if piece.lost_bytes:
                    raise SandboxError(f"sandbox {self._id}: {path} holds more than can be told")
                if piece.stream == "stdout":
                    kept += piece.data
            await self._well(process, path)
        finally:
            await _stop(process)
        return bytes(kept)

    async def _well(self, process: Process, path: str) -> None:
        outcome = await process.wait()
        if outcome.code == 0:
            return
        if outcome.code is None or outcome.code > 128:
            why = f"not done in {FILE_S:g} s" if outcome.timed_out else f"ended with code {outcome.code}"
            raise SandboxError(f"sandbox {self._id}: a file operation on {path} was {why}")
        raise OSError(outcome.code, os.strerror(outcome.code), path)

    async def _named(self, entries: list[Entry]) -> list[FileInfo]:
        users, groups = await asyncio.gather(self._names("/etc/passwd"), self._names("/etc/group"))
        return [FileInfo(path=one.path, mode=one.mode, size=one.size_bytes, owner=users.get(one.uid, str(one.uid)),
                         group=groups.get(one.gid, str(one.gid)), modified_s=one.modified_ns / 1e9, target=one.target)
                for one in entries]  # fmt: skip

    async def _names(self, path: str) -> dict[int, str]:
        """As the box's own list says; a box may have none."""
        data = bytearray()
        try:
            parts = await self.read(path, user="agent")
            async for part in parts:
                data += part
                if len(data) > NAMES_BYTES:
                    await parts.aclose()
                    break
        except OSError:
            return {}
        names: dict[int, str] = {}
        for line in data.decode("utf-8", "replace").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[2].isdecimal():
                names.setdefault(int(fields[2]), fields[0])
        return names


async def _with_first(first: bytes, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for part in parts:
            yield part
    finally:
        await parts.aclose()


async def _ask(process: Process, parts: int) -> None:
    if parts:
        with suppress(SandboxError):  # it has ended: all is here
            await process.send_stdin(b"+" * parts)


async def _stop(process: Process) -> None:
    with suppress(SandboxError, OSError):  # its box may be gone
        await process.signal(signal.SIGKILL)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}"
