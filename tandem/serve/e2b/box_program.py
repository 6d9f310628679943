"""The program that does file verbs inside a box; started there with ``python3 -c``, standard library only.

``verb path [more]``: one JSON object on stdout, ``{"answer": ...}`` or ``{"errno", "strerror", "path"}``. ``read``
writes the file's bytes instead, ``write`` takes them from stdin, ``watch`` prints a line for each change until killed.
"""

import contextlib
import ctypes
import grp
import json
import os
import pwd
import shutil
import stat
import struct
import sys

KINDS = ((0x100, "create"), (0x2, "write"), (0x200, "remove"), (0x40, "rename"), (0x80, "create"), (0x4, "chmod"))
MASK = 0x100 | 0x2 | 0x200 | 0x40 | 0x80 | 0x4
ARRIVED = 0x100 | 0x80  # created here, moved to here
IS_FOLDER = 0x40000000


def name(find, number: int) -> str:
    try:
        return find(number)[0]
    except KeyError:
        return str(number)


def told(path: str) -> dict:
    seen = os.lstat(path)
    return {
        "path": path, "mode": seen.st_mode, "size": seen.st_size, "owner": name(pwd.getpwuid, seen.st_uid),
        "group": name(grp.getgrgid, seen.st_gid), "modified_s": seen.st_mtime,
        "target": os.readlink(path) if stat.S_ISLNK(seen.st_mode) else "",
    }  # fmt: skip


def below(path: str, depth: int):
    for entry in sorted(os.scandir(path), key=lambda one: one.name):
        yield told(entry.path)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from below(entry.path, depth - 1)


def move(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target) or "/", exist_ok=True)
    os.rename(path, target)


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def read(path: str) -> None:
    with open(path, "rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)


def write(path: str) -> None:
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)


class Watch:
    """Source: inotify(7)."""

    def __init__(self, path: str, recursive: bool) -> None:
        if not os.path.isdir(path):
            os.listdir(path)  # raises what it is
        self.path, self.recursive = path, recursive
        self.library = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self.library.inotify_init1(0)
        self.folders: dict = {}
        self.add(path)

    def add(self, folder: str, *, new: bool = False) -> None:
        """Watch a folder. What a ``new`` one holds by now is told: it may have come before the watch. What came just
        then is told twice."""
        number = self.library.inotify_add_watch(self.descriptor, os.fsencode(folder), MASK)
        if number < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
        self.folders[number] = folder
        if self.recursive:
            for entry in os.scandir(folder):
                if new:
                    self.say(entry.path, "create")
                if entry.is_dir(follow_symlinks=False):
                    self.add(entry.path, new=new)

    def say(self, changed: str, kind: str) -> None:
        shown = os.path.relpath(changed, self.path)
        print(json.dumps({"path": changed, "name": shown, "kind": kind}), flush=True)

    def run(self) -> None:
        print(json.dumps({"answer": None}), flush=True)
        while True:
            data = os.read(self.descriptor, 65536)
            while data:
                number, mask, _, size = struct.unpack("iIII", data[:16])
                self.tell(number, mask, data[16 : 16 + size].rstrip(b"\0").decode("utf-8", "replace"))
                data = data[16 + size :]

    def tell(self, number: int, mask: int, child: str) -> None:
        folder = self.folders.get(number, self.path)
        changed = os.path.join(folder, child) if child else folder
        for bit, kind in KINDS:
            if mask & bit:
                self.say(changed, kind)
        if self.recursive and mask & IS_FOLDER and mask & ARRIVED:
            with contextlib.suppress(OSError):  # it is gone again
                self.add(changed, new=True)


def main() -> None:
    verb, path, *more = sys.argv[1:]
    try:
        if verb == "read":
            read(path)
            return
        if verb == "watch":
            Watch(path, more[0] == "1").run()
        verbs = {
            "stat": lambda: told(path),
            "entries": lambda: list(below(path, int(more[0]))),
            "write": lambda: write(path),
            "make_folder": lambda: os.makedirs(path),
            "move": lambda: move(path, more[0]),
            "remove": lambda: remove(path),
        }
        answer: dict = {"answer": verbs[verb]()}
    except OSError as error:
        answer = {"errno": error.errno, "strerror": error.strerror, "path": error.filename}
        if verb == "read":
            print(json.dumps(answer), file=sys.stderr)
            sys.exit(1)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
