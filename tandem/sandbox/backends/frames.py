"""Bytes between the supervisor and the box program; the twin of ``native/wire.c`` and ``native/box.h``.

Owns: the layout. A frame is u32 length, u8 type, u32 command, payload; strings are u32 length, bytes, NUL.
Refuses: frames beyond the limit, in both directions.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Call, CallKind, Layer, LayerKind, Start
from tandem.sandbox.backends.template import Step

PROTOCOL = 3
FRAME_MAX = 1 << 20
STDIN_WINDOW = 256 * 1024
HEAD = struct.Struct("<IBI")
EXIT = struct.Struct("<iIQQQ")
SIZE = struct.Struct("<I")


class Frame(IntEnum):
    RUN = 1
    STDIN = 2
    KILL = 3
    SIGNAL = 4
    RESIZE = 5
    CONNECT = 6
    LISTEN = 7
    QUIET = 8
    SLEPT = 15
    HELLO = 16
    FAIL = 17
    STDOUT = 18
    STDERR = 19
    EXIT = 20
    STDIN_ACK = 21
    STARTED = 22
    SOCKET = 23


TIMED_OUT, OUT_OF_MEMORY, NOT_STARTED, KILLED = 1, 2, 4, 8
AS_ROOT, LONG_LIVED, ON_TERMINAL, AS_OTHER = 1, 2, 4, 8
NO_CAP = 2**64 - 1


def text(value: str | bytes) -> bytes:
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return SIZE.pack(len(data)) + data + b"\0"


def frame(kind: Frame, command: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(5 + len(payload), kind, command) + payload


def run_frame(command: int, call: Call, environment: bytes) -> bytes:
    """``environment``: from ``pack_environment``. Raises SandboxError for strings that no command line can carry."""
    has_input = bool(call.stdin) or call.kind is CallKind.WRITE
    head = call.kind.encode() + struct.pack(
        "<IQQBBII", milliseconds(call.timeout_s), call.stdout_cap_bytes, call.stderr_cap_bytes, has_input, 0, 0, 0
    )
    return _run(command, head, call.folder, call.arguments, environment)


def start_frame(command: int, start: Start, environment: bytes) -> bytes:
    """As ``run_frame``."""
    options = LONG_LIVED | (ON_TERMINAL if start.terminal else 0)
    ids: list[int] = []
    if start.user == "root":
        options |= AS_ROOT
    elif start.user != "agent":
        options |= AS_OTHER
        ids = _ids(start.user)
    timeout_ms = 0 if start.timeout_s is None else milliseconds(start.timeout_s)
    size = (start.terminal.columns, start.terminal.rows) if start.terminal else (0, 0)
    head = start.kind.encode() + struct.pack(
        "<IQQBBII", timeout_ms, NO_CAP, NO_CAP, start.stdin, options, *size
    )
    more = struct.pack(f"<{len(ids) + 1}I", len(ids), *ids) if ids else b""
    return _run(command, head, start.folder, start.arguments, environment, more)


def _ids(user: str) -> list[int]:
    numbers = user.split(":")
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        raise SandboxError(f"user {user[:40]!r} is no UID:GID", hint="sandbox.users.as_user finds a name's")
    return [int(number) for number in numbers]


def milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), 2**31)


def pack_environment(environment: Mapping[str, str]) -> bytes:
    """Raises ``SandboxError`` for a NUL character."""
    return _strings([f"{name}={value}" for name, value in environment.items()])


def _run(
    command: int, head: bytes, folder: str, arguments: Sequence[str], environment: bytes, more: bytes = b""
) -> bytes:
    _refuse_nul(folder)
    payload = b"".join((head, text(folder), _strings(arguments), environment, more))
    if len(payload) + 5 > FRAME_MAX:
        raise SandboxError(
            f"the command line is {len(payload)} bytes; at most {FRAME_MAX}",
            hint="write it into a file of the box first",
        )
    return frame(Frame.RUN, command, payload)


def _strings(values: Sequence[str]) -> bytes:
    for value in values:
        _refuse_nul(value)
    return SIZE.pack(len(values)) + b"".join([text(value) for value in values])


def _refuse_nul(value: str) -> None:
    if "\0" in value:
        raise SandboxError(f"a command cannot carry a NUL character: {value[:80]!r}")


def pack_steps(steps: Sequence[Step]) -> bytes:
    return struct.pack("<I", len(steps)) + b"".join(
        step.kind.encode() + text(step.path) + text(step.argument) + struct.pack("<I", step.mode) for step in steps
    )


def create_message(
    box: int,
    *,
    hostname: str,
    outer_ids: tuple[int, int, int],
    work_id: int,
    disk: tuple[int, int],
    num_processes: int,
    data_bytes: int,
    watch_bytes: int,
    cgroups: Iterable[tuple[str, bool, list[tuple[str, str]]]],
    steps: bytes,
    layers: Sequence[Layer] = (),
    words: str = "",
) -> bytes:
    """``outer_ids``: first uid, first gid, how many; ``disk``: bytes, inodes; ``steps``: from ``pack_steps``;
    ``layers``: top first; ``words``: for the supervisor that adopts the box."""
    groups = list(cgroups)
    packed = struct.pack("<I", len(groups)) + b"".join(
        text(folder)
        + struct.pack("<BI", unified, len(values))
        + b"".join(text(name) + text(value) for name, value in values)
        for folder, unified, values in groups
    )
    return b"".join((
        b"C", struct.pack("<I", box), text(hostname), struct.pack("<IIII", *outer_ids, work_id),
        struct.pack("<QQQQQ", *disk, num_processes, data_bytes, watch_bytes), text(packed), text(steps),
        text(_layers(layers)), text(words),
    ))


def _layers(layers: Sequence[Layer]) -> bytes:
    return struct.pack("<I", len(layers)) + b"".join(
        (b"f" if layer.kind is LayerKind.FOLDER else b"e")
        + text(os.fsencode(layer.path)) + text(os.fsencode(layer.device or ""))
        for layer in layers
    )
