"""The error tree, and the one place where foreign exceptions become ours.

Every error pickles, says what failed with which id and what to do (``hint``), and whether trying again can
help (``retryable``).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TandemError(Exception):
    """Base of all errors a user may see. ``str()`` is the message; the hint is printed below it."""

    retryable = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[TandemError], message: str, hint: str) -> TandemError:
    return kind(message, hint=hint)


class ConfigError(TandemError):
    """A recipe, flag or option is wrong."""


class PluginError(TandemError):
    """A name could not be resolved, or a plug-in's code failed to load."""


class EngineError(TandemError):
    """The inference or train engine failed."""


class ModelError(EngineError):
    """A model folder or file is missing, broken or unsupported."""


class EngineLost(EngineError):
    """The engine's own process ended."""


class PromptTooLong(EngineError):
    """The prompt does not fit the context."""


class RequestAborted(EngineError):
    """The engine gave a request up when new weights came; a fresh attempt may work."""

    retryable = True


class NotRunning(EngineError):
    """The request that others were to go on from is not running: it ended, or never was."""


class SandboxError(TandemError):
    """A box failed."""


class SandboxTimeout(SandboxError):
    """A box did not answer within its deadline."""

    retryable = True


class SandboxGone(SandboxError):
    """The box is dead or lost; a fresh one may work."""

    retryable = True


class SandboxUnavailable(SandboxError):
    """This machine cannot give what the spec asks for."""


class SnapshotError(SandboxError):
    """A snapshot could not be taken, kept or used."""


class SnapshotMissing(SnapshotError):
    """There is no snapshot of this name, or something that it is made of is gone."""


class SnapshotCorrupt(SnapshotError):
    """What is kept of a snapshot is not what was put there."""


class BuildFailed(SandboxError):
    """A command of an image's build failed."""


class EpisodeError(TandemError):
    """An episode failed."""


class WorkflowError(EpisodeError):
    """The user's workflow or environment raised."""

    retryable = True


class RewardError(EpisodeError):
    """A reward raised, hung, or returned something that is not a number."""


class RecordError(TandemError):
    """The event log or a checkpoint is missing, broken or does not fit."""


class ClusterError(TandemError):
    """A worker could not be placed or was lost."""


@contextmanager
def boundary(kind: type[TandemError], what: str, *, hint: str = "") -> Iterator[None]:
    """Turn any exception of foreign code into ``kind`` with ``what`` in front; ours pass unchanged."""
    try:
        yield
    except TandemError:
        raise
    except (Exception, SystemExit) as error:  # a file that exits while it is loaded does not end the command
        raise kind(f"{what}: {type(error).__name__}: {error}", hint=hint) from error


@contextmanager
def writing(place: Path, kind: type[TandemError], *, hint: str = "") -> Iterator[None]:
    """Turn what the system says against writing at ``place`` into ``kind``, with the file that it is about."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        if full := disk_full(error, place):
            raise kind(full, hint=hint or "make room, then try again") from error
        if not isinstance(error, OSError):
            raise
        path = error.filename if isinstance(error.filename, str) else place
        raise kind(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error


def disk_full(error: BaseException, place: Path | None = None) -> str:
    """The one sentence for a full disk, by whatever library it comes; empty for every other error."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and "No space left on device" not in str(error):  # Rust's and C++'s libraries keep the words alone
        return ""
    named = error.filename if isinstance(error, OSError) else None
    return f"no space left at {named or place or 'the disk that is written to'}"
