"""File operations of a box as one shell line each, for services whose file API says less than ours asks.

Owns: the lines, and that their output is what the in-box agent of our own boxes would print. They need a POSIX shell
and GNU find. No link is followed below the path that was named.
"""

from __future__ import annotations

import shlex

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Call, CallKind

# find's type letters as the type bits of st_mode, in octal
TYPES = {"f": "10", "d": "04", "l": "12", "c": "02", "b": "06", "p": "01", "s": "14"}


def script_of(call: Call) -> str:
    """Exits with 0, or with 1 and the system's words for what is wrong on stderr."""
    first, *more = (shlex.quote(argument) for argument in call.arguments)
    match call.kind:
        case CallKind.LIST:
            return _checked(first, f"find {first}/. -mindepth 1 -maxdepth 1 -printf '%f\\0'")
        case CallKind.STAT:
            return f"{_present(first)}\n{_entries(first, 0, 0)}"
        case CallKind.ENTRIES:
            return _checked(first, _entries(first, 1, int(call.arguments[1])))
        case CallKind.MAKE_FOLDER:
            return f"[ -e {first} ] && {{ echo 'File exists' >&2; exit 1; }}\nmkdir -p -- {first} || exit 1"
        case CallKind.MOVE:
            return f"mkdir -p -- \"$(dirname -- {more[0]})\" && mv -fT -- {first} {more[0]} || exit 1"
        case CallKind.REMOVE:
            return f"rm -r --interactive=never -- {first} || exit 1"
        case kind:
            raise SandboxError(f"{kind.name} is no file operation by the shell")


def _checked(path: str, line: str) -> str:
    """find says nothing of a file that was meant to be a folder."""
    is_folder = f"[ -d {path} ] || {{ echo 'Not a directory' >&2; exit 1; }}"
    return f"{_present(path)}\n{is_folder}\n{line} || exit 1"


def _present(path: str) -> str:
    return f"[ -e {path} ] || [ -L {path} ] || {{ echo 'No such file or directory' >&2; exit 1; }}"


def _entries(path: str, least: int, most: int) -> str:
    kinds = " ".join(
        f"{'-o ' if number else ''}-type {letter} -printf '{bits}%04m %U %G %s %T@\\0%p\\0%l\\0'"
        for number, (letter, bits) in enumerate(TYPES.items())
    )
    start = f"find {path} -mindepth {least} -maxdepth {most} \\( {kinds} \\)"
    return f"{start} | sed -z -E 's/^([0-7]+ [0-9]+ [0-9]+ [0-9]+ [0-9]+)\\.([0-9]{{9}})[0-9]*$/\\1 \\2/'"
