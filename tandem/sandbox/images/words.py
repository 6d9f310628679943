"""Words of a Dockerfile: quotes, escapes and variables.

Owns: ``$name``, ``${name}``, ``${name:-word}``, ``${name:+word}`` (and both without the colon), and what quotes mean
for them. A variable that is not set is empty, as in Docker. Source: Dockerfile reference, "Environment replacement".
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.errors import ConfigError


def expand(text: str, variables: Mapping[str, str], *, escape: str = "\\") -> str:
    """One word: variables put in, quotes and escapes taken away."""
    return "".join(_Reader(text, variables, escape).read(stop=""))


def split(text: str, *, escape: str = "\\") -> list[str]:
    """Words as they stand, at blanks outside quotes."""
    words: list[str] = []
    current, quote, position = "", "", 0
    while position < len(text):
        letter = text[position]
        if letter == escape and quote != "'" and position + 1 < len(text):
            current += text[position : position + 2]
            position += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter.isspace():
            if current:
                words.append(current)
            current = ""
            position += 1
            continue
        current += letter
        position += 1
    if quote:
        raise ConfigError(f"a {quote} is never closed in {text!r}")
    return [*words, current] if current else words


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str) -> None:
        self._text = text
        self._variables = variables
        self._escape = escape
        self._position = 0

    def read(self, *, stop: str) -> list[str]:
        out: list[str] = []
        quote = ""
        while self._position < len(self._text):
            letter = self._text[self._position]
            if letter == stop and not quote:
                return out
            self._position += 1
            if quote == "'":
                if letter == "'":
                    quote = ""
                else:
                    out.append(letter)
            elif letter == self._escape and self._position < len(self._text):
                following = self._text[self._position]
                self._position += 1
                out.append(following if not quote or following in f'"${self._escape}' else letter + following)
            elif letter in "'\"" and (not quote or letter == quote):
                quote = "" if quote else letter
            elif letter == "$":
                out.append(self._variable())
            else:
                out.append(letter)
        if quote or stop:
            raise ConfigError(f"a {quote or stop} is never closed in {self._text!r}")
        return out

    def _variable(self) -> str:
        if self._text[self._position : self._position + 1] != "{":
            name = self._name()
            return self._variables.get(name, "") if name else "$"
        self._position += 1
        name = self._name()
        rest = self._text[self._position :]
        operator = next((sign for sign in (":-", ":+", "-", "+", "}") if rest.startswith(sign)), "")
        if not name or not operator:
            raise ConfigError(f"{self._text!r}: only ${{name}}, ${{name:-word}} and ${{name:+word}} are known")
        self._position += len(operator)
        value = self._variables.get(name, "")
        if operator == "}":
            return value
        word = "".join(self.read(stop="}"))
        self._position += 1
        there = bool(value) if operator.startswith(":") else name in self._variables
        return (value if there else word) if operator.endswith("-") else (word if there else "")

    def _name(self) -> str:
        start = self._position
        while self._position < len(self._text):
            letter = self._text[self._position]
            if not (letter.isascii() and (letter.isalpha() or letter == "_" or (letter.isdigit()
                                                                               and self._position > start))):
                break
            self._position += 1
        return self._text[start : self._position]
