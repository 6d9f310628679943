"""Commands and files of a box by whole calls, for backends without long-lived processes.

Owns: a command as one call (its output streams, its deadline kills all of it) and file verbs as small programs that
run in the box as its user. Refuses, by name: standard input, signals, terminals, watching, other users.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from tandem.core.errors import SandboxError, SandboxUnavailable
from tandem.sandbox.backend import Call, Outcome, Piece, Start, Terminal
from tandem.sandbox.session import Session
from tandem.serve.e2b.files import FileChange, FileInfo

NO_END_S = 86_400.0
FILE_S = 30.0
KEPT_BYTES = 2**20
_numbers = itertools.count(2**21)  # no pid of the box can be that large: nobody mistakes one for the other
_PROGRAM = r"""
import grp, json, os, pwd, shutil, stat, sys
def name(find, number):
    try:
        return find(number)[0]
    except KeyError:
        return str(number)
def told(path):
    seen = os.lstat(path)
    return {"path": path, "mode": seen.st_mode, "size": seen.st_size, "owner": name(pwd.getpwuid, seen.st_uid),
            "group": name(grp.getgrgid, seen.st_gid), "modified_s": seen.st_mtime,
            "target": os.readlink(path) if stat.S_ISLNK(seen.st_mode) else ""}
def below(path, depth):
    for entry in sorted(os.scandir(path), key=lambda one: one.name):
        yield told(entry.path)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from below(entry.path, depth - 1)
verb, path, *more = sys.argv[1:]
try:
    if verb == "stat":
        answer = told(path)
    elif verb == "entries":
        answer = list(below(path, int(more[0])))
    elif verb == "make_folder":
        answer = os.makedirs(path)
    elif verb == "move":
        os.makedirs(os.path.dirname(more[0]) or "/", exist_ok=True)
        answer = os.rename(path, more[0])
    elif os.path.isdir(path) and not os.path.islink(path):
        answer = shutil.rmtree(path)
    else:
        answer = os.unlink(path)
    print(json.dumps({"answer": answer}))
except OSError as error:
    print(json.dumps({"errno": error.errno, "strerror": error.strerror, "path": error.filename}))
"""


class CalledProcess:
    """A backend ``Process`` that is one call."""

    def __init__(self, session: Session, start: Start) -> None:
        if start.terminal is not None:
            raise _refused("a terminal")
        if start.stdin:
            raise _refused("standard input of a running command")
        _own(start.user)
        self.pid = next(_numbers)
        self._kept: list[Piece] = []
        self._kept_bytes = 0
        self._news = asyncio.Condition()
        self._calling = asyncio.ensure_future(session.call(Call(
            arguments=list(start.arguments), folder=start.folder, environment=start.environment,
            timeout_s=start.timeout_s or NO_END_S, stdout_cap_bytes=KEPT_BYTES, stderr_cap_bytes=KEPT_BYTES,
            on_stdout=lambda data: self._hear("stdout", data), on_stderr=lambda data: self._hear("stderr", data),
        )))  # fmt: skip
        self._calling.add_done_callback(lambda _: self._tell())

    async def output(self, *, from_start: bool = False) -> AsyncIterator[Piece]:
        place = 0 if from_start else len(self._kept)
        while True:
            while place < len(self._kept):
                yield self._kept[place]
                place += 1
            if self._calling.done():
                self._calling.result()
                return
            async with self._news:
                if place >= len(self._kept) and not self._calling.done():
                    await self._news.wait()

    async def wait(self) -> Outcome:
        outcome = await asyncio.shield(self._calling)
        if not outcome.started and not outcome.timed_out:
            raise SandboxError(f"the command did not start: {outcome.stderr.decode('utf-8', 'replace').strip()}")
        return outcome

    async def send_stdin(self, data: bytes) -> None:
        raise _refused("standard input of a running command")

    async def close_stdin(self) -> None:
        raise _refused("standard input of a running command")

    async def resize(self, terminal: Terminal) -> None:
        raise _refused("a terminal")

    async def signal(self, number: int) -> None:
        raise _refused("signals to a running command")

    def _hear(self, stream: str, data: bytes) -> None:
        self._kept.append(Piece(stream, data))
        self._tell()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        asyncio.ensure_future(tell())


class CalledFiles:
    """``BoxFiles`` over the session's calls."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self, path: str, *, max_bytes: int, user: str) -> bytes:
        _own(user)
        return await self._session.files.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, user: str) -> None:
        _own(user)
        await self._session.files.write(path, data)

    async def stat(self, path: str, *, user: str) -> FileInfo:
        return FileInfo(**await self._run(user, "stat", path))

    async def entries(self, path: str, *, depth: int, user: str) -> list[FileInfo]:
        return [FileInfo(**one) for one in await self._run(user, "entries", path, str(depth))]

    async def make_folder(self, path: str, *, user: str) -> None:
        await self._run(user, "make_folder", path)

    async def move(self, path: str, target: str, *, user: str) -> None:
        await self._run(user, "move", path, _absolute(target))

    async def remove(self, path: str, *, user: str) -> None:
        await self._run(user, "remove", path)

    async def watch(self, path: str, *, recursive: bool, user: str) -> AsyncGenerator[FileChange, None]:
        raise _refused("watching folders")

    async def _run(self, user: str, verb: str, path: str, *more: str) -> Any:
        _own(user)
        words = ["python3", "-S", "-c", _PROGRAM, verb, _absolute(path), *more]
        done = await self._session.commands.run(words, timeout_s=FILE_S)
        if done.exit_code != 0 or done.truncated:
            raise SandboxError(f"sandbox {self._session.id}: {verb} of {path} failed: {done.stderr.strip()[-200:]}")
        told = json.loads(done.stdout)
        if "errno" in told:
            raise OSError(told["errno"], told["strerror"], told["path"])
        return told["answer"]


def _own(user: str) -> None:
    if user != "agent":
        raise _refused(f"user {user}")


def _refused(what: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"{what}: this sandbox's backend runs whole commands only")


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/home/agent/{path}"
