"""What passes between an engine in a process of its own and its caller: records behind a length and a number.

Owns: the frames. Refuses: tensors, which go through a transport. A frame that cannot be read ends the connection.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

from tandem.core import errors
from tandem.core.errors import EngineError, TandemError
from tandem.core.types import Completion, EngineStats, Floats, GenerateRequest, Ids, Top, WeightVersion
from tandem.core.wire import decode, encode
from tandem.engine.transports.transport import Layout

MOST_BYTES = 1 << 30
_HEAD = struct.Struct("<IB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Make an engine. ``files`` are inherited descriptors, ``names`` (checkpoint's, ours, first row, last row) say
    which part of which tensor has which name in the model's folder; ``settings`` is the program's own JSON."""

    settings: str
    transport: str
    layout: Layout
    files: tuple[int, ...]
    names: tuple[tuple[str, str, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    call: int
    request: GenerateRequest
    is_guided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """``ways``: a call, the id of its request and its seed, each a way on from a running request's answer. One
    message, so that all of them begin at the same token."""

    request_id: str
    ways: tuple[tuple[int, str, int], ...]
    at: int | None
    is_guided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Nobody waits for this call any more."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Weights lie in ``slot``; ``sums`` are uint64, eight a tensor."""

    call: int
    version: WeightVersion
    slot: int
    sums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The tokens that may come next: one bit each, the first token the lowest; or why there are none."""

    call: int
    bits: bytes
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of several calls: one of each at one place; and the counters after them. ``tops`` are those of the
    calls that asked for them, with their places."""

    calls: Ids
    token_ids: Ids
    logprobs: Floats
    stats: EngineStats
    tops: tuple[tuple[int, Top], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A call's prompt was computed. Comes before the first of its tokens, if the call asked for it."""

    call: int
    logprobs: Floats
    tops: tuple[Top, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A call ended well; ``completion`` is that of a generation."""

    call: int
    stats: EngineStats
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A call (-1: the start) ended with an error."""

    call: int
    kind: str
    message: str
    hint: str

    def error(self) -> TandemError:
        """The error on this side."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, TandemError):
            return kind(self.message, hint=self.hint)
        return EngineError(f"{self.kind}: {self.message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A guide is asked what may follow these tokens, the ones since its last answer."""

    call: int
    token_ids: Ids


KINDS: tuple[type, ...] = (
    Start, Generate, Cancel, Abort, Load, Sleep, Wake, Mask, Ready, Tokens, Done, Failed, Ask, Fork,
    Scored,
)  # fmt: skip
_NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(KINDS)}


def frame(message: object) -> bytes:
    """A message as it travels."""
    body = encode(message)
    return _HEAD.pack(len(body), _NUMBERS[type(message)]) + body


async def read_message(reader: asyncio.StreamReader) -> object | None:
    """The next message; None at the end of the stream.

    Raises:
        EngineError, RecordError: bytes that are none.
    """
    try:
        length, number = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if length > MOST_BYTES or number >= len(KINDS):
            raise EngineError(f"a frame of {length} bytes and kind {number} came from the engine's process")
        return decode(await reader.readexactly(length), KINDS[number])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def failed(call: int, error: BaseException) -> Failed:
    """An error as a message."""
    if isinstance(error, TandemError):
        return Failed(call=call, kind=type(error).__name__, message=error.message, hint=error.hint)
    return Failed(call=call, kind=type(error).__name__, message=str(error), hint="")
