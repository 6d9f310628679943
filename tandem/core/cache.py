"""Where this machine keeps what can be made again: compiled kernels, converted models.

Owns: the one folder and how something appears in it whole. Refuses: anything a run needs to be resumed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.core.errors import ConfigError, writing


def cache_folder(*parts: str) -> Path:
    """``$XDG_CACHE_HOME/tandem/...`` (``~/.cache`` where it is not set), created.

    Raises:
        ConfigError: it cannot be made.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home, "tandem", *parts)
    with writing(folder, ConfigError, hint=_HINT):
        folder.mkdir(parents=True, exist_ok=True)
    return folder

_HINT = "make it writable, or set XDG_CACHE_HOME to a folder that is"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system frees it when the process dies."""
    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_folder(target: Path, build: Callable[[Path], object]) -> Path:
    """Build ``target`` once: ``build`` fills a sibling folder, which then appears under its name in one step.
    Processes that ask together wait for the first one; a failed or killed build leaves no ``target``.

    Raises:
        ConfigError: the place of ``target`` cannot be written.
    """
    if target.is_dir():
        return target
    with writing(target.parent, ConfigError, hint=_HINT), file_lock(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return target
        for left_over in target.parent.glob(f".{target.name}.*/"):  # of a build that was killed: we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            build(scratch)
            scratch.chmod(0o755)
            os.replace(scratch, target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return target
