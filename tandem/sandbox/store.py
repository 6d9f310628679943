"""Where blobs of snapshots are kept: a local folder, or any place that fsspec reaches.

Owns: the names of blobs (the digest of what they hold), and that a blob appears whole or not at all. Refuses: to
give out bytes that are not what was put there. Its methods block: call them from a thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from tandem.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing, boundary

CHUNK_BYTES = 2**20
# These show an object only when all of it is there; elsewhere a scratch name and a rename do that.
WHOLE_OR_NOTHING = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "memory"})


def file_digest(path: Path) -> str:
    """Hex BLAKE2b-256 of a file, as ``core.wire.digest`` of its bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


class BlobStore:
    """``place`` is a folder, or a URL of fsspec (``s3://bucket/folder``, ``memory://x``, ``file:///folder``)."""

    def __init__(self, place: str) -> None:
        with boundary(SnapshotError, f"the store {place} cannot be opened", hint="is the package of its scheme there?"):
            files, root = fsspec.url_to_fs(place)
        self.place = place
        self._files: Any = files
        self._root = str(root).rstrip("/")
        protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
        self._whole = bool(protocols & WHOLE_OR_NOTHING)
        self._local = Path(self._root) if "file" in protocols else None
        self._verified: dict[str, tuple[int, int, int]] = {}

    @property
    def local(self) -> bool:
        return self._local is not None

    def put(self, path: Path, name: str) -> None:
        """Move a file with this digest into the store.

        Raises:
            SnapshotError: no room, no way; nothing half written is left.
        """
        num_bytes = path.stat().st_size
        if self._size(name) == num_bytes:
            path.unlink()
            return
        with self._trouble(name, "kept"):
            if self._local is not None:
                _move_in(path, self._path(name), name)
            else:
                self._upload(path, name, num_bytes)
                path.unlink()

    def fetch(self, name: str, target: Path) -> None:
        """Copy a blob to a file, verified; on any error there is no file.

        Raises:
            SnapshotMissing, SnapshotCorrupt: naming the blob. SnapshotError.
        """
        hasher = hashlib.blake2b(digest_size=32)
        try:
            with self._trouble(name, "read"), self._open(name) as source, target.open("wb") as out:
                while chunk := source.read(CHUNK_BYTES):
                    hasher.update(chunk)
                    out.write(chunk)
            self._check(name, hasher.hexdigest())
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def path(self, name: str) -> Path | None:
        """The blob's own file in a local store, verified (again only after it was touched); None elsewhere. Raises
        as ``fetch``."""
        if self._local is None:
            return None
        path = self._path(name)
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise self._missing(name) from error
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._verified.get(name) != seen:
            with self._trouble(name, "read"):
                self._check(name, file_digest(path))
            self._verified[name] = seen
        return path

    def has(self, name: str) -> bool:
        return self._size(name) is not None

    def delete(self, name: str) -> None:
        """Idempotent."""
        self._verified.pop(name, None)
        with self._trouble(name, "deleted"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._key(name))

    def names(self) -> set[str]:
        """Every blob, and scratch names that a killed process left."""
        with self._trouble("*", "listed"):
            try:
                found = self._files.find(self._root)
            except FileNotFoundError:
                return set()
        return {str(each).rsplit("/", 1)[-1] for each in found}

    def _size(self, name: str) -> int | None:
        with self._trouble(name, "looked for"):
            try:
                return int(self._files.size(self._key(name)))
            except FileNotFoundError:
                return None

    def _upload(self, path: Path, name: str, num_bytes: int) -> None:
        self._files.makedirs(self._key(name).rsplit("/", 1)[0], exist_ok=True)
        key = self._key(name)
        scratch = key if self._whole else f"{key}.new"
        try:
            self._files.put_file(str(path), scratch)
            if self._files.size(scratch) != num_bytes:
                raise OSError(errno.EIO, "the store took only a part of it")
            if scratch != key:
                self._files.mv(scratch, key)
        except BaseException:
            with contextlib.suppress(Exception):  # what failed before is what is told
                self._files.rm_file(scratch)
            raise

    def _open(self, name: str) -> BinaryIO:
        try:
            return self._files.open(self._key(name), "rb")
        except FileNotFoundError as error:
            raise self._missing(name) from error

    def _check(self, name: str, found: str) -> None:
        if found != name:
            raise SnapshotCorrupt(
                f"blob {name} in {self.place} is not what was put there (its digest is {found[:16]}...)",
                hint="put a good copy in its place, or delete the snapshots that are made of it",
            )

    def _missing(self, name: str) -> SnapshotMissing:
        return SnapshotMissing(f"blob {name} is missing from {self.place}")

    def _key(self, name: str) -> str:
        blob = name.split(".", 1)[0]
        return f"{self._root}/{blob[:2]}/{name}"

    def _path(self, name: str) -> Path:
        return Path(self._key(name))

    @contextlib.contextmanager
    def _trouble(self, name: str, what: str) -> Iterator[None]:
        with boundary(SnapshotError, f"blob {name} of {self.place} cannot be {what}"):
            try:
                yield
            except OSError as error:
                raise storage_error(f"blob {name} of {self.place} cannot be {what}", error) from error


def storage_error(what: str, error: OSError) -> SnapshotError:
    """What a failed write of a snapshot is called; a full disk is named."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    detail = "the disk is full" if full else f"{error.strerror or error}"
    return SnapshotError(f"{what}: {detail}", hint="make room, then try again" if full else "")


def _move_in(path: Path, target: Path, name: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{name}.new")
    try:
        try:
            os.rename(path, scratch)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(path, scratch)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        os.rename(scratch, target)
        sync_folder(target.parent)
        path.unlink(missing_ok=True)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Names in it outlive the machine from here on."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
