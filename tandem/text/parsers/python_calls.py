"""Following calls that are Python: each argument is told when it is whole, as JSON.

What is followed: ``[name(argument=literal), ...]``, and one call a line, printed or not, in a ``tool_code`` block.
Anything else is read when the text is whole.
"""

from __future__ import annotations

import ast
import enum
import json
import re
from collections.abc import Collection
from typing import ClassVar

import msgspec

from tandem.text.call_stream import CallStream
from tandem.text.tails import longest_tail

_NAME = r"[A-Za-z_][\w.]*"
_FIRST = re.compile(rf"\[\s*({_NAME})\s*\(")
_MAYBE_FIRST = re.compile(rf"\[\s*(?:{_NAME}\s*)?\Z")
_NEXT = re.compile(rf"\s*,\s*({_NAME})\s*\(")
OPENING = "```tool_code"
_BLOCK = re.compile(rf"{OPENING}[ \t]*\n")
_MAYBE_BLOCK = re.compile(rf"{OPENING}[ \t]*\Z")
_LINE = re.compile(rf"\s*(print\s*\(\s*)?({_NAME})\s*\(")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)\Z", re.DOTALL)
_OPEN, _CLOSED = "([{", ")]}"
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError)


class _JsonNames(ast.NodeTransformer):
    """Models mix the two, and what is forced is JSON's (``pythonic.py``)."""

    VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


def plain_value(written: str | ast.expr) -> object:
    """The value of a literal, Python's or JSON's, as JSON and records can hold it.

    Raises:
        One of ``UNREADABLE``: it is no literal, or half a surrogate pair, or a huge number.
    """
    tree = ast.parse(written, mode="eval").body if isinstance(written, str) else written
    value = json.loads(json.dumps(ast.literal_eval(_JsonNames().visit(tree)), allow_nan=False))
    msgspec.msgpack.encode(value)
    return value


class _State(enum.Enum):
    BEFORE = "before"
    LINE = "line"
    ARGUMENTS = "arguments"
    AFTER = "after"


class PythonCalls(CallStream):
    """``fenced``: in a block, one call a line; else in one list that begins with a call of one of ``names``."""

    def __init__(self, *, fenced: bool, names: Collection[str]) -> None:
        super().__init__()
        self._fenced, self._names = fenced, names
        self._state = _State.BEFORE
        self._printed = False
        self._block = 0  # where the block began, while it has no call
        self._reset()

    def _reset(self) -> None:
        self._seen: set[str] = set()  # names of the call's arguments
        self._scanned, self._depth, self._quote = 0, 0, ""

    def _step(self) -> bool:
        match self._state:
            case _State.BEFORE:
                return self._find_block() if self._fenced else self._find_list()
            case _State.LINE:
                return self._find_line()
            case _State.ARGUMENTS:
                return self._argument()
            case _State.AFTER:
                return self._after_line() if self._fenced else self._after_call()

    # ---- where calls begin
    def _find_list(self) -> bool:
        for found in _FIRST.finditer(self._text):
            if found[1] in self._names:
                self._drop(found.start())
                self._open_call(found[1], found.end() - found.start())
                return True
        rest = _MAYBE_FIRST.search(self._text)
        self._drop(len(self._text) if rest is None else rest.start())
        return False

    def _find_block(self) -> bool:
        if (found := _BLOCK.search(self._text)) is not None:
            self._block = self._at + found.start()
            self._drop(found.end())
            self._state = _State.LINE
            return True
        found = _MAYBE_BLOCK.search(self._text)
        self._drop(len(self._text) - longest_tail(self._text, [OPENING]) if found is None else found.start())
        return False

    def _find_line(self) -> bool:
        found = _LINE.match(self._text)
        if found is None or (found[2] == "print" and not found[1]):
            # ``print(`` alone may still become a printed call.
            return False
        first = not self.calls
        self._printed = found[1] is not None
        self._open_call(found[2], found.end())
        if first:
            self.first = self._block
        return True

    def _open_call(self, name: str, count: int) -> None:
        self._begin(name, count)
        self._reset()
        self._state = _State.ARGUMENTS

    # ---- arguments
    def _argument(self) -> bool:
        end = self._find_end()
        if end < 0:
            return False
        written, ends = self._text[:end], self._text[end] == ")"
        before = ", " if self._seen else "{"
        if ends and not written.strip():
            self._write("}" if self._seen else "{}", end + 1)
        else:
            found = _ARGUMENT.match(written)
            if found is None or found[1] in self._seen:
                return self._lose()
            try:
                value = json.dumps(plain_value(found[2].strip()), ensure_ascii=False)
            except UNREADABLE:
                return self._lose()
            self._seen.add(found[1])
            self._write(f"{before}{json.dumps(found[1], ensure_ascii=False)}: {value}{'}' if ends else ''}", end + 1)
        self._scanned = 0
        if ends:
            self._state = _State.AFTER
        return True

    def _find_end(self) -> int:
        """Where the comma or bracket after the next argument stands; -1: not here yet."""
        text = self._text
        while self._scanned < len(text):
            place = self._scanned
            char, left = text[place], len(text) - place
            if self._quote:
                if char == "\\":
                    if left < 2:
                        return -1
                    self._scanned += 2
                elif char != self._quote[0]:
                    self._scanned += 1
                elif text.startswith(self._quote, place):
                    self._scanned += len(self._quote)
                    self._quote = ""
                elif left < len(self._quote) and text[place:] == char * left:
                    return -1  # perhaps the end of a text in three quotes
                else:
                    self._scanned += 1
            elif char in "'\"":
                if left < 3 and text[place:] == char * left:
                    return -1  # one quote or three
                self._quote = char * 3 if text.startswith(char * 3, place) else char
                self._scanned += len(self._quote)
            elif not self._depth and char in ",)":
                return place
            else:
                if char in "#" or (char in _CLOSED and not self._depth):
                    self._lose()
                    return -1
                self._depth += (char in _OPEN) - (char in _CLOSED)
                self._scanned += 1
        return -1

    def _lose(self) -> bool:
        self._is_lost = True
        return False

    # ---- what follows a call
    def _after_call(self) -> bool:
        if (found := re.match(r"\s*\]", self._text)) is not None:
            self._close(found.end())
            return self._lose()
        if (found := _NEXT.match(self._text)) is None:
            return False
        self._open_call(found[1], found.end())
        return True

    def _after_line(self) -> bool:
        if self._printed:
            if (found := re.match(r"\s*\)", self._text)) is None:
                return False
            self._printed = False
            self._drop(found.end())
        if (found := re.match(r"\s*\n```", self._text)) is not None:
            self._close(found.end())
            self._state = _State.BEFORE
            return True
        if re.match(r"[ \t]*\n\s*[A-Za-z_]", self._text) is None:
            return False
        self._state = _State.LINE
        return True
