"""Dockerfiles as instructions.

Owns: lines (continuations, comments, directives, here-documents), the two forms of commands, flags, and which
instructions there are. Refuses: what it does not know, by line. Variables stay as written: their values are the
builder's. Source: Dockerfile reference.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tandem.core.errors import ConfigError

KNOWN = frozenset({
    "FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "EXPOSE", "VOLUME", "LABEL",
    "SHELL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "ONBUILD",
})  # fmt: skip
FLAGS = {
    "FROM": {"platform"}, "COPY": {"from", "chown", "chmod", "link"}, "ADD": {"chown", "chmod", "link"},
    "RUN": {"mount", "network", "security"},
}  # fmt: skip
WITH_FLAGS = frozenset((*FLAGS, "HEALTHCHECK"))
COMMANDS = frozenset({"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD", "VOLUME"})
HEREDOC = re.compile(r"<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2(?=\s|$)")
DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A here-document. ``literal``: its end was quoted, so variables in it stay."""

    name: str
    text: str
    literal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    kind: str
    text: str  # all after the keyword and flags
    words: tuple[str, ...] | None = None  # of the JSON form
    flags: dict[str, list[str]] = field(default_factory=dict)
    documents: tuple[Document, ...] = ()
    line: int = 0

    def __str__(self) -> str:
        flags = "".join(f"--{name}={value} " for name, values in self.flags.items() for value in values)
        return f"{self.kind} {flags}{self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    instructions: tuple[Instruction, ...]
    escape: str = "\\"


def parse(text: str, *, name: str = "Dockerfile") -> Dockerfile:
    """Raises ConfigError with the line."""
    lines = text.lstrip("\ufeff").splitlines()
    escape = _escape(lines)
    instructions: list[Instruction] = []
    position = 0
    while position < len(lines):
        start = position
        whole, position = _logical(lines, position, escape)
        if not whole:
            continue
        keyword, _, rest = whole.partition(" ") if " " in whole else whole.partition("\t")
        kind = keyword.upper()
        where = f"{name}, line {start + 1}"
        if kind not in KNOWN:
            raise ConfigError(f"{where}: {keyword!r} is no instruction that we know", hint=", ".join(sorted(KNOWN)))
        flags, rest = _flags(kind, rest.strip(), where)
        documents: list[Document] = []
        if kind in ("RUN", "COPY", "ADD"):
            for dash, quote, end in HEREDOC.findall(rest):
                body, position = _document(lines, position, end, bool(dash), where)
                documents.append(Document(name=end, text=body, literal=bool(quote)))
        if not rest:
            raise ConfigError(f"{where}: {kind} says nothing")
        instructions.append(Instruction(
            kind=kind, text=rest, words=_json(rest) if kind in COMMANDS else None, flags=flags,
            documents=tuple(documents), line=start + 1,
        ))
    first = next((item.kind for item in instructions if item.kind != "ARG"), None)
    if first != "FROM":
        raise ConfigError(f"{name}: the first instruction must be FROM", hint="only ARG may stand before it")
    return Dockerfile(instructions=tuple(instructions), escape=escape)


def _escape(lines: list[str]) -> str:
    for line in lines:
        found = DIRECTIVE.fullmatch(line.strip())
        if found is None:
            break
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise ConfigError(f"the escape character cannot be {found[2]!r}", hint="\\ or `")
            return found[2]
    return "\\"


def _logical(lines: list[str], position: int, escape: str) -> tuple[str, int]:
    """A line with its continuations; comments and empty lines among them are left out."""
    whole = ""
    while position < len(lines):
        line = lines[position].strip() if not whole else lines[position].rstrip()
        position += 1
        if line.lstrip().startswith("#") or not line.strip():
            if not whole:
                return "", position
            continue
        if line.endswith(escape):
            whole += line[:-1]
            continue
        return whole + line, position
    return whole.strip(), position


def _flags(kind: str, rest: str, where: str) -> tuple[dict[str, list[str]], str]:
    flags: dict[str, list[str]] = {}
    while kind in WITH_FLAGS and (found := re.match(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)", rest)):
        if kind != "HEALTHCHECK" and found[1] not in FLAGS[kind]:
            raise ConfigError(f"{where}: {kind} has no --{found[1]} here", hint=", ".join(sorted(FLAGS[kind])))
        flags.setdefault(found[1], []).append(found[2] or "")
        rest = rest[found.end() :]
    return flags, rest


def _document(lines: list[str], position: int, end: str, dash: bool, where: str) -> tuple[str, int]:
    body: list[str] = []
    for number in range(position, len(lines)):
        line = lines[number].lstrip("\t") if dash else lines[number]
        if line == end:
            return "".join(f"{item}\n" for item in body), number + 1
        body.append(line)
    raise ConfigError(f"{where}: the here-document {end} never ends")


def _json(text: str) -> tuple[str, ...] | None:
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None  # Docker takes it for a shell line, too
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None
