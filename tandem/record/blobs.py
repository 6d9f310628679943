"""Content-addressed bytes: a blob's name is the digest of what it holds.

Owns: the ``blobs`` folder of a run. Invariants: a blob appears whole; what ``get`` returns has the digest that was
asked for, or it raises.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tandem.core.errors import RecordError, writing
from tandem.core.wire import digest


class BlobStore:
    """Blobs in two levels of folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes) -> str:
        """Store bytes under their digest; storing them again costs a look.

        Raises:
            RecordError: the disk is full or gone.
        """
        name = digest(data)
        target = self._path(name)
        if not target.exists():
            with writing(target.parent, RecordError, hint="make room, then resume the run"):
                self._write(target, data)
        return name

    def _write(self, target: Path, data: bytes) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not the temporary-file library: it would hide a run's blobs from everyone else who may read the run.
        scratch = target.with_name(f".new-{target.name}-{os.getpid()}-{threading.get_ident()}")
        try:
            scratch.write_bytes(data)
            os.replace(scratch, target)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def get(self, name: str) -> bytes:
        """The bytes of a digest.

        Raises:
            RecordError: no such blob, or its bytes are not what they were.
        """
        try:
            data = self._path(name).read_bytes()
        except OSError as error:
            raise RecordError(f"blob {name} is missing from {self._folder}") from error
        if digest(data) != name:
            raise RecordError(f"blob {name} in {self._folder} was changed")
        return data

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name
