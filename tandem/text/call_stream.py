"""Tool calls while they are written: the name first, then the arguments piece by piece.

Owns: what a format's follower keeps. Invariants: what is told does not depend on the pieces that the text comes in; the
pieces, joined, are the call's arguments; a call that was begun stays a call, also where it is cut or turns out to be no
JSON.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """More of the call number ``index``: its name, or some of its arguments' text."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Written:
    """A call as far as it was written. ``is_whole``: its end was seen."""

    name: str
    arguments: str = ""
    is_whole: bool = False


class CallStream:
    """Text in, pieces of calls out. A format makes its own by ``_step``; this one follows nothing, so that all calls
    come when the text is whole."""

    def __init__(self) -> None:
        self.calls: list[Written] = []
        self.first = 0  # where in the text the first call begins, if there is one
        self.num_out = 0  # characters of the text, up to the last that a piece was made of
        self._text = ""  # what nothing was made of yet
        self._at = 0  # characters before it
        self._is_lost = False  # no more pieces: what follows is not written as this format's calls are
        self._pieces: list[CallPiece] = []

    def push(self, text: str) -> list[CallPiece]:
        """What is now certain."""
        if self._is_lost:
            return []
        self._text += text
        while not self._is_lost and self._step():
            pass
        return self._take_pieces()

    def finish(self) -> list[CallPiece]:
        """The text ends here."""
        if not self._is_lost:
            self._end()
        return self._take_pieces()

    def _step(self) -> bool:
        """Make something of the beginning of ``_text``; False: more of it must come."""
        self._is_lost = True
        return False

    def _end(self) -> None:
        """Make what can be made of the rest."""

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._at += count

    def _begin(self, name: str, count: int) -> None:
        """A call begins with the next ``count`` characters."""
        if not self.calls:
            self.first = self._at
        self.calls.append(Written(name))
        self._pieces.append(CallPiece(index=len(self.calls) - 1, name=name))
        self._pass(count)

    def _write(self, arguments: str, count: int) -> None:
        """The next ``count`` characters are these arguments."""
        if arguments:
            self.calls[-1].arguments += arguments
            self._pieces.append(CallPiece(index=len(self.calls) - 1, arguments=arguments))
        self._pass(count)

    def _close(self, count: int) -> None:
        """All calls so far end within the next ``count`` characters."""
        for call in self.calls:
            call.is_whole = True
        self._pass(count)

    def _pass(self, count: int) -> None:
        self._drop(count)
        self.num_out = self._at

    def _take_pieces(self) -> list[CallPiece]:
        made, self._pieces = self._pieces, []
        return made
