"""Following calls that are fenced blocks: the block's text is told, as a JSON string, line by line or sooner.

What may be the end of a block, three backticks or more on a line of their own and the line end before them, waits.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

from tandem.text.call_stream import CallStream

_OPENING = re.compile(r"(`{3,})([A-Za-z0-9_.-]+)[ \t]*")
_CLOSING = re.compile(r"(`{3,})[ \t]*")
_MAYBE_CLOSING = re.compile(r"`*|`{3,}[ \t]*")


class _State(enum.Enum):
    OUTSIDE = "outside"
    OTHER = "other"  # a block that is no call
    CALL = "call"


class FenceCalls(CallStream):
    """``parameters``: the one that each tool has."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        super().__init__()
        self._parameters = parameters
        self._state = _State.OUTSIDE
        self._fence = 0  # backticks that opened the block
        self._line_end = ""  # not told yet
        self._in_line = False  # the line that goes on has begun to be told

    def _step(self) -> bool:
        end = self._text.find("\n")
        if end < 0:
            if self._state is _State.CALL and (self._in_line or _MAYBE_CLOSING.fullmatch(self._text) is None):
                self._tell(self._text, len(self._text))
                self._in_line = True
            return False
        line = self._text[:end]
        match self._state:
            case _State.OUTSIDE if (found := _OPENING.fullmatch(line)) is not None:
                self._open(len(found[1]), found[2], end + 1)
            case _State.OTHER if self._closes(line):
                self._state = _State.OUTSIDE
                self._drop(end + 1)
            case _State.CALL if self._closes(line):
                self._finish_call(end + 1)
            case _State.CALL:
                self._tell(line, end + 1)
                self._line_end, self._in_line = "\n", False
            case _:
                self._drop(end + 1)
        return True

    def _open(self, fence: int, name: str, count: int) -> None:
        self._fence, self._in_line, self._line_end = fence, False, ""
        if name in self._parameters:
            self._begin(name, count)
            self._write(f"{{{json.dumps(self._parameters[name], ensure_ascii=False)}: \"", 0)
            self._state = _State.CALL
        else:
            self._drop(count)
            self._state = _State.OTHER

    def _closes(self, line: str) -> bool:
        found = None if self._in_line else _CLOSING.fullmatch(line)
        return found is not None and len(found[1]) >= self._fence

    def _tell(self, text: str, count: int) -> None:
        told, self._line_end = self._line_end + text, ""
        self._write(json.dumps(told, ensure_ascii=False)[1:-1], count)

    def _finish_call(self, count: int) -> None:
        self._write('"}', 0)
        self._close(count)
        self._state = _State.OUTSIDE

    def _end(self) -> None:
        if self._state is _State.CALL:
            if self._closes(self._text):
                self._finish_call(len(self._text))
            else:
                self._tell(self._text, len(self._text))
