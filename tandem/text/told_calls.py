"""The calls of an answer as a client is told them, whether they were followed or read in the whole text.

Owns: merging the two. Invariant: what was told while it was written stays as it was told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from tandem.core.types import ToolCall
from tandem.text.call_stream import Written
from tandem.text.tool_format import ParsedText, arguments_text, call_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldCall:
    """A call and the text of its arguments as a client was told it. ``is_whole``: it was not cut."""

    call: ToolCall
    text: str
    is_whole: bool = True


def merged(followed: Sequence[Written], found: ParsedText) -> tuple[ToldCall, ...]:
    """The calls of a whole text: first those that were followed, then those that only its end told."""
    read = {call.id: call for call in found.calls}
    made = []
    for index, written in enumerate(followed):
        same = read.pop(call_id(index), None)
        is_whole = written.is_whole or (same is not None and same.name == written.name)
        call = call_as_told(call_id(index), written.name, written.arguments)
        made.append(ToldCall(call=call, text=written.arguments, is_whole=is_whole))
    for call in read.values():
        text = arguments_text(call)
        made.append(ToldCall(call=replace(call, id=call_id(len(made))), text=text))
    return tuple(made)


def call_as_told(number: str, name: str, arguments: str) -> ToolCall:
    """A call from the text of its arguments, whatever that is."""
    try:
        value = json.loads(arguments)
        msgspec.msgpack.encode(value)  # half a surrogate pair or a huge number reads, but no record can hold it
    except (ValueError, RecursionError, OverflowError):
        value = None
    if isinstance(value, dict):
        return ToolCall(id=number, name=name, arguments=value)
    return ToolCall(id=number, name=name, arguments={}, unread=arguments)
