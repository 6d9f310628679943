"""``filesystem.Filesystem``: files of a box by name, and what changes in its folders.

Owns: the messages of the service, and the watchers that clients poll. Refuses: to follow a path on the host: every
verb runs in the box, as the user that was asked for.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import PurePosixPath

from tandem.serve.e2b.boxes import Entry
from tandem.serve.e2b.envd.connect import Call, Message, Service, with_keepalive
from tandem.serve.e2b.faults import Code, Fault
from tandem.serve.e2b.files import FileChange, FileInfo

MAX_EVENTS = 10_000  # kept for a client that does not poll; the oldest go first
WATCHER_IDLE_S = 600.0  # a watcher that nobody polls ends
MAX_WATCHERS = 64  # of one box
KEEPALIVE: Message = {"keepalive": {}}
_TYPES = {stat.S_IFREG: "FILE_TYPE_FILE", stat.S_IFDIR: "FILE_TYPE_DIRECTORY", stat.S_IFLNK: "FILE_TYPE_SYMLINK"}


class Watcher:
    """Collects what happens in a folder until it is asked."""

    def __init__(self, source: AsyncIterator[FileChange]) -> None:
        self.asked = time.monotonic()
        self._events: deque[FileChange] = deque(maxlen=MAX_EVENTS)
        self._collecting = asyncio.ensure_future(self._collect(source))

    def take(self) -> list[FileChange]:
        self.asked = time.monotonic()
        if self._collecting.done() and not self._events and (error := self._collecting.exception()) is not None:
            raise error
        taken = list(self._events)
        self._events.clear()
        return taken

    async def close(self) -> None:
        self._collecting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._collecting

    async def _collect(self, source: AsyncIterator[FileChange]) -> None:
        async for change in source:
            self._events.append(change)


class Watchers:
    """The watchers of one box by id."""

    def __init__(self) -> None:
        self._known: dict[str, Watcher] = {}

    async def add(self, source: AsyncIterator[FileChange]) -> str:
        for name in [name for name, one in self._known.items() if time.monotonic() - one.asked > WATCHER_IDLE_S]:
            await self._known.pop(name).close()
        if len(self._known) >= MAX_WATCHERS:
            raise Fault(429, f"{MAX_WATCHERS} watchers are open in this sandbox: remove one")
        name = secrets.token_hex(8)
        self._known[name] = Watcher(source)
        return name

    def get(self, name: str) -> Watcher:
        if name not in self._known:
            raise Fault(404, f"no watcher {name}", code=Code.NOT_FOUND)
        return self._known[name]

    async def remove(self, name: str) -> None:
        await self.get(name).close()
        self._known.pop(name, None)

    async def close(self) -> None:
        while self._known:
            await self._known.popitem()[1].close()


def service_of(entry: Entry) -> Service:
    """The service of one box."""
    watchers = entry.keep("watchers", Watchers)

    async def stated(call: Call, message: Message) -> Message:
        return {"entry": _shown(await entry.files.stat(_path(message, "path"), user=call.user))}

    async def make_dir(call: Call, message: Message) -> Message:
        path = _path(message, "path")
        await entry.files.make_folder(path, user=call.user)
        return {"entry": _shown(await entry.files.stat(path, user=call.user))}

    async def move(call: Call, message: Message) -> Message:
        destination = _path(message, "destination")
        await entry.files.move(_path(message, "source"), destination, user=call.user)
        return {"entry": _shown(await entry.files.stat(destination, user=call.user))}

    async def list_dir(call: Call, message: Message) -> Message:
        path, depth = _path(message, "path"), int(message.get("depth") or 1)
        found = await entry.files.entries(path, depth=depth, user=call.user)
        return {"entries": [_shown(one) for one in found]}

    async def remove(call: Call, message: Message) -> Message:
        await entry.files.remove(_path(message, "path"), user=call.user)
        return {}

    async def watch_dir(call: Call, message: Message) -> AsyncIterator[Message]:
        source = await entry.files.watch(
            _path(message, "path"), recursive=bool(message.get("recursive", False)), user=call.user
        )
        yield {"start": {}}
        include = bool(message.get("includeEntry", False))
        try:
            async with asyncio.timeout(call.timeout_s):
                async for one in with_keepalive(_changes(entry, source, include, call), call.keepalive_s, KEEPALIVE):
                    yield one
        finally:
            await source.aclose()

    async def create_watcher(call: Call, message: Message) -> Message:
        source = await entry.files.watch(
            _path(message, "path"), recursive=bool(message.get("recursive", False)), user=call.user
        )
        return {"watcherId": await watchers.add(source)}

    async def get_events(call: Call, message: Message) -> Message:
        taken = watchers.get(str(message.get("watcherId"))).take()
        return {"events": [_event(change) for change in taken]}

    async def remove_watcher(call: Call, message: Message) -> Message:
        await watchers.remove(str(message.get("watcherId")))
        return {}

    return Service(
        unary={"Stat": stated, "MakeDir": make_dir, "Move": move, "ListDir": list_dir, "Remove": remove,
               "CreateWatcher": create_watcher, "GetWatcherEvents": get_events, "RemoveWatcher": remove_watcher},
        server_stream={"WatchDir": watch_dir},
        client_stream={},
    )  # fmt: skip


async def _changes(
    entry: Entry, source: AsyncIterator[FileChange], include: bool, call: Call
) -> AsyncIterator[Message]:
    async for change in source:
        event = _event(change)
        if include and change.kind != "remove":
            with suppress(OSError):  # it is gone again: the event goes without it
                event["entry"] = _shown(await entry.files.stat(change.path, user=call.user))
        yield {"filesystem": event}


def _event(change: FileChange) -> Message:
    return {"name": change.name, "type": f"EVENT_TYPE_{change.kind.upper()}"}


def _path(message: Message, field: str) -> str:
    path = message.get(field)
    if not isinstance(path, str) or not path:
        raise Fault(400, f"{field} is missing")
    return path


def _shown(info: FileInfo) -> Message:
    """An ``EntryInfo``. 64-bit numbers are strings in the JSON of protobuf."""
    kind = stat.S_IFMT(info.mode)
    modified = datetime.fromtimestamp(info.modified_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    shown: Message = {
        "name": PurePosixPath(info.path).name or "/",
        "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size),
        "mode": stat.S_IMODE(info.mode),
        "permissions": stat.filemode(info.mode)[1:] if kind not in _TYPES else stat.filemode(info.mode),
        "owner": info.owner,
        "group": info.group,
        "modifiedTime": modified,
    }
    return shown | ({"symlinkTarget": info.target, "isSymlink": True} if info.target else {})
