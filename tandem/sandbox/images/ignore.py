"""``.dockerignore``: which files of a folder are no part of its build.

Owns: its patterns: ``*``, ``?``, ``[...]`` within a name, ``**`` over names, ``!`` for exceptions; the last pattern
that fits decides, and a folder that is left out takes its content along unless an exception names some of it.
Source: Dockerfile reference, ".dockerignore file"; Go's ``filepath.Match``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Ignore:
    def __init__(self, lines: Iterable[str]) -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for line in lines:
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            keep = text.startswith("!")
            pattern = "/".join(part for part in text.removeprefix("!").strip().split("/") if part not in ("", "."))
            if pattern:
                self._rules.append((re.compile(translate(pattern)), keep))
        self.has_exceptions = any(keep for _, keep in self._rules)

    def __call__(self, path: str) -> bool:
        """Whether a relative path is left out."""
        ancestors = [path[:position] for position, letter in enumerate(path) if letter == "/"] + [path]
        out = False
        for pattern, keep in self._rules:
            if any(pattern.fullmatch(part) for part in ancestors):
                out = not keep
        return out


def translate(pattern: str) -> str:
    """A pattern as a regular expression for whole relative paths."""
    out, position = "", 0
    while position < len(pattern):
        letter = pattern[position]
        position += 1
        if letter == "*":
            if pattern[position : position + 1] == "*":
                position += 1
                if pattern[position : position + 1] == "/":
                    position += 1
                    out += "(?:.*/)?"
                else:
                    out += ".*"
            else:
                out += "[^/]*"
        elif letter == "?":
            out += "[^/]"
        elif letter == "[" and (end := pattern.find("]", position + 1)) > 0:
            inner = pattern[position:end]
            out += f"[{'^' if inner[0] in '^!' else ''}{inner.lstrip('^!') if inner[0] in '^!' else inner}]"
            position = end + 1
        elif letter == "\\" and position < len(pattern):
            out += re.escape(pattern[position])
            position += 1
        else:
            out += re.escape(letter)
    return out
