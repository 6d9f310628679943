"""Builds written as a list of steps (``{"type": "RUN", "args": [...]}``), as E2B's SDKs send them.

Owns: turning steps into the instructions of a Dockerfile, so that both are built by the same code. A COPY brings its
files as a tar found by the hash that the SDK uploaded it under.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.core.errors import ConfigError
from tandem.sandbox.images.dockerfile import Dockerfile, Instruction


class Step(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """RUN: command[, user]. COPY: source, destination[, owner[, mode]]. ENV: name, value[, name, value ...].
    WORKDIR: folder. USER: name."""

    type: str
    args: list[str] = []
    files_hash: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Steps:
    file: Dockerfile
    files: Mapping[int, Path]  # line of a COPY: its tar


def read_steps(steps: Sequence[Step], *, base: str, files: Callable[[str], Path]) -> Steps:
    """Instructions for steps on ``base``.

    Raises:
        ConfigError: a step that is none, or files that were not uploaded.
    """
    made = [Instruction(kind="FROM", text=base, line=0)]
    tars: dict[int, Path] = {}
    for line, step in enumerate(steps, 1):
        kind = step.type.upper()
        where = f"step {line} ({step.type})"
        if kind in ("RUN", "WORKDIR", "USER") and not step.args:
            raise ConfigError(f"{where} has no arguments")
        if kind == "RUN":
            made += _run(step, line)
        elif kind in ("COPY", "ADD"):
            if len(step.args) < 2 or not step.files_hash:
                raise ConfigError(f"{where} needs a source, a destination and the hash of its files")
            tars[line] = files(step.files_hash)
            if not tars[line].is_file():
                raise ConfigError(f"{where}: its files were not uploaded", hint=f"their hash is {step.files_hash}")
            flags = {name: [value] for name, value in zip(("chown", "chmod"), step.args[2:], strict=False) if value}
            words = (step.args[0], step.args[1])
            made.append(Instruction(kind="COPY", text=shlex.join(words), words=words, flags=flags, line=line))
        elif kind == "ENV":
            if len(step.args) % 2 or not step.args:
                raise ConfigError(f"{where} needs names and values")
            pairs = zip(step.args[::2], step.args[1::2], strict=True)
            made.append(Instruction(kind="ENV", text=" ".join(f"{name}={_quoted(value)}" for name, value in pairs),
                                    line=line))
        elif kind in ("WORKDIR", "USER"):
            made.append(Instruction(kind=kind, text=_quoted(step.args[0]), line=line))
        else:
            raise ConfigError(f"{where} is no step that we know", hint="RUN, COPY, ENV, WORKDIR, USER")
    return Steps(Dockerfile(instructions=tuple(made)), tars)


def _run(step: Step, line: int) -> list[Instruction]:
    """A command through the shell; its own user, if it names one, for this step alone."""
    words = ("/bin/sh", "-c", step.args[0])
    if len(step.args) > 1 and step.args[1]:
        flags = {"user": [step.args[1]]}
        return [Instruction(kind="RUN", text=step.args[0], words=words, flags=flags, line=line)]
    return [Instruction(kind="RUN", text=step.args[0], words=words, line=line)]


def _quoted(value: str) -> str:
    """A value that no variable changes."""
    return "'" + value.replace("'", "'\\''") + "'"


def decode_steps(data: bytes) -> list[Step]:
    """Raises ConfigError."""
    try:
        return msgspec.convert(json.loads(data), list[Step])
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"these are no build steps: {error}") from error
