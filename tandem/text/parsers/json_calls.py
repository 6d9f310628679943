"""Following calls that are JSON objects of ``name`` and, behind it, the arguments, which are told as they are written.

An object in another order is not followed: its call comes when the text is whole.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Sequence

from tandem.text.call_stream import CallStream


class _State(enum.Enum):
    BETWEEN = "between"
    HEAD = "head"
    ARGUMENTS = "arguments"
    TAIL = "tail"


class JsonCalls(CallStream):
    """``opening`` and ``closing`` stand around each object (perhaps nothing); ``keys`` are the words for arguments;
    ``names``: other objects are no calls; None: every name is one."""

    def __init__(
        self, *, opening: str = "", closing: str = "", keys: Sequence[str], names: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self._opening = opening or "{"
        words = "|".join(map(re.escape, keys))
        self._head = re.compile(
            rf'{re.escape(opening)}\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:{words})"\s*:\s*(?=\{{)'
        )
        self._tail = re.compile(rf"\s*\}}\s*{re.escape(closing)}")
        self._names = names
        self._state = _State.BETWEEN
        self._depth = 0
        self._in_text = self._is_escaped = False

    def _step(self) -> bool:
        match self._state:
            case _State.BETWEEN:
                place = self._text.find(self._opening)
                if place < 0:
                    self._drop(max(0, len(self._text) - len(self._opening) + 1))
                    return False
                self._drop(place)
                self._state = _State.HEAD
            case _State.HEAD:
                if (found := self._head.match(self._text)) is None:
                    return False
                name = _read(found[1])
                if not name or (self._names is not None and name not in self._names):
                    self._is_lost = True
                    return False
                self._begin(name, found.end())
                self._state = _State.ARGUMENTS
            case _State.ARGUMENTS:
                count = self._scan()
                self._write(self._text[:count], count)
                if self._depth:
                    return False
                self._state = _State.TAIL
            case _State.TAIL:
                if (found := self._tail.match(self._text)) is None:
                    return False
                self._close(found.end())
                self._state = _State.BETWEEN
        return True

    def _scan(self) -> int:
        """How many characters belong to the arguments."""
        for place, char in enumerate(self._text):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(self._text)


def _read(written: str) -> str:
    """A JSON text's value; empty where it is none, or none that can be kept."""
    try:
        value = json.loads(written)
        value.encode()
    except ValueError:
        return ""
    return value
