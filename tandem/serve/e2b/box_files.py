"""``BoxFiles`` by small programs that run inside the box (``box_program``), for backends without file streams.

Owns: one process a verb, as the user that was asked for. The box needs ``python3`` for all but reading and writing as
its own user, which go through the session; files are held whole. Invariant: what was dropped of a program's output is
an error, not a gap.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import signal
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import suppress
from typing import Any

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import HOME, Process, Start
from tandem.sandbox.session import Session
from tandem.serve.e2b.files import FileChange, FileInfo

FILE_S = 60.0
OWN = "agent"
MAX_BYTES = 512 * 2**20  # of a file
PART_BYTES = 65536
Starter = Callable[[Start], Awaitable[Process]]


class ProgramFiles:
    """``start`` starts a command in the session's box; ``can_watch``: such a command can be stopped again."""

    def __init__(self, session: Session, start: Starter, *, can_watch: bool) -> None:
        self._session, self._start, self._can_watch = session, start, can_watch
        self._program = importlib.resources.files("tandem.serve.e2b").joinpath("box_program.py").read_text()

    async def read(self, path: str, *, user: str) -> AsyncGenerator[bytes, None]:
        if user == OWN:
            return _whole(await self._session.files.read(path, max_bytes=MAX_BYTES))
        out, err, code = await self._run(user, "read", path)
        if code != 0:
            _raise(err)
        return _whole(out)

    async def write(self, path: str, parts: AsyncIterable[bytes], *, user: str) -> None:
        data = b"".join([part async for part in parts])
        if user == OWN:
            await self._session.files.write(path, data)
        else:
            await self._ask(user, "write", path, stdin=data)

    async def stat(self, path: str, *, user: str) -> FileInfo:
        return FileInfo(**await self._ask(user, "stat", path))

    async def entries(self, path: str, *, depth: int, user: str) -> list[FileInfo]:
        return [FileInfo(**one) for one in await self._ask(user, "entries", path, str(depth))]

    async def make_folder(self, path: str, *, user: str) -> None:
        await self._ask(user, "make_folder", path)

    async def move(self, path: str, target: str, *, user: str) -> None:
        await self._ask(user, "move", path, _absolute(target))

    async def remove(self, path: str, *, user: str) -> None:
        await self._ask(user, "remove", path)

    async def watch(self, path: str, *, recursive: bool, user: str) -> AsyncGenerator[FileChange, None]:
        if not self._can_watch:
            raise SandboxError("folders cannot be watched: this sandbox's backend runs whole commands only")
        process = await self._start(self._asked(user, "watch", path, "1" if recursive else "0"))
        lines = _lines(process)
        async with asyncio.timeout(FILE_S):
            first = await anext(lines, b"{}")
        if "errno" in (told := json.loads(first)):
            _raise(first)
        if "answer" not in told:
            raise SandboxError(f"sandbox {self._session.id}: {path} cannot be watched")
        return _changes(process, lines)

    async def _ask(self, user: str, verb: str, path: str, *more: str, stdin: bytes | None = None) -> Any:
        out, err, code = await self._run(user, verb, path, *more, stdin=stdin)
        if code != 0:
            why = err.decode("utf-8", "replace").strip()[-200:]
            raise SandboxError(f"sandbox {self._session.id}: {verb} of {path} ended with code {code}: {why}")
        told = json.loads(out)
        if "errno" in told:
            _raise(out)
        return told["answer"]

    async def _run(
        self, user: str, verb: str, path: str, *more: str, stdin: bytes | None = None
    ) -> tuple[bytes, bytes, int | None]:
        process = await self._start(self._asked(user, verb, path, *more, stdin=stdin is not None))
        feeding = asyncio.ensure_future(_feed(process, stdin)) if stdin is not None else None
        kept = {"stdout": bytearray(), "stderr": bytearray()}
        try:
            async for piece in process.output(from_start=True):
                kept[piece.stream] += piece.data
            outcome = await process.wait()
        finally:
            if feeding is not None:
                feeding.cancel()
                with suppress(asyncio.CancelledError, SandboxError, OSError):  # it ended before it had read all
                    await feeding
        if outcome.dropped_bytes:
            raise SandboxError(f"sandbox {self._session.id}: {verb} of {path} gives more than can be kept")
        return bytes(kept["stdout"]), bytes(kept["stderr"]), outcome.code

    def _asked(self, user: str, verb: str, path: str, *more: str, stdin: bool = False) -> Start:
        if "\0" in path:
            raise ValueError(f"a NUL character in {path[:80]!r}")
        words = ["python3", "-S", "-c", self._program, verb, _absolute(path), *more]
        return Start(arguments=words, folder="/", user=user, stdin=stdin,
                     timeout_s=None if verb == "watch" else FILE_S)  # fmt: skip


async def _changes(process: Process, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[FileChange, None]:
    try:
        async for line in lines:
            yield FileChange(**json.loads(line))
    finally:
        with suppress(SandboxError, OSError):  # its box may be gone
            await process.signal(signal.SIGKILL)


async def _whole(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


async def _feed(process: Process, data: bytes) -> None:
    for first in range(0, len(data), PART_BYTES):
        await process.send_stdin(data[first : first + PART_BYTES])
    await process.close_stdin()


async def _lines(process: Process) -> AsyncGenerator[bytes, None]:
    held = bytearray()
    async for piece in process.output(from_start=True):
        if piece.stream == "stdout":
            held += piece.data
            while (end := held.find(b"\n")) >= 0:
                yield bytes(held[:end])
                del held[: end + 1]


def _raise(data: bytes) -> None:
    try:
        told = json.loads(data)
        error = OSError(told["errno"], told["strerror"], told["path"])
    except (ValueError, KeyError, TypeError):
        error = SandboxError(f"a file verb failed: {data.decode('utf-8', 'replace').strip()[-200:]}")
    raise error


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}"
