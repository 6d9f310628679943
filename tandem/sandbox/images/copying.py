"""COPY and ADD: which files go where, worked out on the files themselves without starting a box.

Owns: patterns of sources, where each file ends (links of the image are followed, never out of it), owners and
modes, and a digest of it all that leaves times out, so that a fresh checkout finds the cached layer.
Source: Dockerfile reference, "COPY" and "ADD".
"""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from re import fullmatch

from tandem.core.errors import ConfigError, SandboxError
from tandem.sandbox.backend import Layer
from tandem.sandbox.images.compression import decompressed
from tandem.sandbox.images.ignore import Ignore, translate
from tandem.sandbox.images.layer_tar import LayerWriter
from tandem.sandbox.images.tar_reader import read_tar
from tandem.sandbox.images.tree import build_tree
from tandem.sandbox.images.unpack import unpack
from tandem.sandbox.images.view import Found, View

PIECE = 1 << 20
TAR_MAGIC = b"ustar"


@dataclass(frozen=True, slots=True)
class Context:
    """Where files are copied from. ``keeps_owners``: another stage's files keep theirs, a folder's become root's."""

    view: View
    ignored: Callable[[str], bool] = lambda path: False
    keeps_owners: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One file of the new layer. ``source`` None: a folder that was missing."""

    path: str
    source: Found | None
    view: View | None
    mode: int
    uid: int
    gid: int


@contextmanager
def folder_context(folder: Path, *, ignore_file: str = ".dockerignore") -> Iterator[Context]:
    """A folder of the host, and what its ``.dockerignore`` leaves of it."""
    ignored: Callable[[str], bool] = lambda path: False  # noqa: E731
    if (rules := folder / ignore_file).is_file():
        ignored = Ignore(rules.read_text().splitlines())
    with View([Layer(path=folder)], host_base=False) as view:
        yield Context(view, ignored)


@contextmanager
def tar_context(archive: Path) -> Iterator[Context]:
    """The files of a tar, compressed or not (gzip, zstd, bzip2, xz)."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".context-") as scratch:
        plain = Path(scratch, "tar")
        with plain.open("wb") as out:
            for piece in _plain_pieces(archive):
                out.write(piece)
        with plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            unpack(build_tree(read_tar(data, name=str(archive)), name=str(archive)).root, data, Path(scratch, "files"))
        with View([Layer(path=Path(scratch, "files"))], host_base=False) as view:
            yield Context(view)


def _plain_pieces(archive: Path) -> Iterator[bytes]:
    with archive.open("rb") as file:
        head = file.read(6)
    opener = bz2.open if head.startswith(b"BZh") else lzma.open if head.startswith(b"\xfd7zXZ") else open
    with opener(archive, "rb") as source:
        yield from decompressed(iter(lambda: source.read(PIECE), b""), what=str(archive))


def is_archive(view: View, found: Found) -> bool:
    """Whether ADD unpacks a file."""
    with open(os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=found.place), "rb") as file:
        head = file.read(512)
    return head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")) or head[257:262] == TAR_MAGIC


def matching(context: Context, pattern: str) -> list[str]:
    """Clean paths of a context that a source names; an exact name counts even if it is no pattern that fits.

    Raises:
        ConfigError: there is none.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ConfigError(f"{pattern} leads out of the build's folder")
    found = [""]
    for part in parts:
        step: list[str] = []
        for parent in found:
            exact = f"{parent}/{part}" if parent else part
            if context.view.find(_resolved(context, exact)) is not None:
                step.append(exact)
            elif any(letter in part for letter in "*?["):
                folder = _resolved(context, parent)
                names = context.view.names(folder) if _is_folder(context.view, folder) else []
                step += [f"{parent}/{name}" if parent else name for name in names if fullmatch(translate(part), name)]
        found = step
    found = [path for path in found if not path or not context.ignored(path) or _has_kept(context, path)]
    if not found:
        raise ConfigError(f"no file {pattern} to copy", hint="is it left out by .dockerignore?")
    return found


def plan(
    context: Context,
    sources: Sequence[str],
    destination: str,
    view: View,
    *,
    owner: Owner | None = None,
    mode: int | None = None,
) -> list[Planned]:
    """The files of the new layer in order. ``destination`` is absolute; ``sources`` are clean paths of the context.

    Raises:
        ConfigError: several sources for one file.
    """
    made = _Plan(context, view, owner, mode)
    target = view.resolve(destination)
    into = destination.endswith(("/", "/.")) or len(sources) > 1 or _is_folder(view, target)
    for source in sources:
        clean = _resolved(context, source)
        found = context.view.find(clean)
        assert found is not None
        if found.is_folder:
            made.add_folder(target)
            made.add_content(clean, target)
        else:
            made.add_file(found, f"{target}/{source.rpartition('/')[2]}".strip("/") if into else target)
    return made.items


class _Plan:
    def __init__(self, context: Context, view: View, owner: Owner | None, mode: int | None) -> None:
        self._context = context
        self._view = view
        self._owner = owner
        self._mode = mode
        self._folders: set[str] = {""}
        self.items: list[Planned] = []

    def add_content(self, source: str, target: str) -> None:
        for name in self._context.view.names(source):
            inner = f"{source}/{name}" if source else name
            found = self._context.view.find(inner)
            if found is None:
                continue
            place = f"{target}/{name}" if target else name
            if found.is_folder:
                if not self._context.ignored(inner):
                    self.add_folder(self._view.resolve(place), found)
                elif not _has_kept(self._context, inner):
                    continue
                self.add_content(inner, self._view.resolve(place))
            elif not self._context.ignored(inner):
                self.add_file(found, place)

    def add_file(self, found: Found, path: str) -> None:
        parent, _, name = path.rpartition("/")
        folder = self._view.resolve(parent)
        self.add_folder(folder)
        self._add(found, f"{folder}/{name}" if folder else name)

    def add_folder(self, path: str, found: Found | None = None) -> None:
        """A folder and all above it: those the image has stay as they are, though the layer must repeat them."""
        if path in self._folders:
            return
        parent = path.rpartition("/")[0]
        self.add_folder(parent)
        self._folders.add(path)
        there = self._view.find(path)
        if there is not None and there.is_folder:
            status = there.status
            self.items.append(
                Planned(path, there, self._view, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
            )
        elif found is not None:
            self._add(found, path)
        else:
            owner = self._owner or Owner(uid=0, gid=0)
            self.items.append(Planned(path, None, None, 0o755, owner.uid, owner.gid))

    def _add(self, found: Found, path: str) -> None:
        status = found.status
        kept = Owner(uid=status.st_uid, gid=status.st_gid) if self._context.keeps_owners else Owner(uid=0, gid=0)
        owner = self._owner or kept
        mode = stat.S_IMODE(status.st_mode) if self._mode is None else self._mode
        self.items.append(Planned(path, found, self._context.view, mode, owner.uid, owner.gid))


def digest(items: Sequence[Planned]) -> str:
    """Of paths, kinds, modes, owners and content; not of times."""
    hasher = hashlib.sha256()
    for item in items:
        kind = stat.S_IFMT(item.source.status.st_mode) if item.source else stat.S_IFDIR
        hasher.update(f"{item.path}\0{kind}\0{item.mode}\0{item.uid}\0{item.gid}\0".encode("utf-8", "surrogateescape"))
        if item.source is not None and kind == stat.S_IFREG:
            with _opened(item.source) as file:
                hasher.update(hashlib.file_digest(file, "sha256").digest())
        elif item.source is not None and kind == stat.S_IFLNK:
            hasher.update(os.fsencode(os.readlink(item.source.path, dir_fd=item.source.place)))
    return hasher.hexdigest()


def write(items: Sequence[Planned], target: Path) -> None:
    """The new layer's tar."""
    with LayerWriter(target) as writer:
        for item in items:
            found = item.source
            mtime = found.status.st_mtime if found else 0.0
            if found is None or found.is_folder:
                writer.folder(item.path, mode=item.mode, uid=item.uid, gid=item.gid, mtime=mtime)
            elif found.is_link:
                target_path = os.readlink(found.path, dir_fd=found.place)
                writer.link(item.path, target_path, uid=item.uid, gid=item.gid, mtime=mtime)
            elif stat.S_ISREG(found.status.st_mode):
                with _opened(found) as file:
                    size = os.fstat(file.fileno()).st_size
                    writer.file(item.path, file, size, mode=item.mode, uid=item.uid, gid=item.gid, mtime=mtime)
            else:
                raise SandboxError(f"{item.path} is no file, folder or link, and cannot be copied")


def _opened(found: Found) -> io.BufferedReader:
    return open(os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found.place), "rb")


def _resolved(context: Context, path: str) -> str:
    return context.view.resolve(path)


def _is_folder(view: View, path: str) -> bool:
    found = view.find(path)
    return found is not None and found.is_folder


def _has_kept(context: Context, path: str) -> bool:
    """Whether an exception may bring something of an ignored folder back."""
    return isinstance(context.ignored, Ignore) and context.ignored.has_exceptions and _is_folder(context.view, path)


def plan_folder(path: str, view: View) -> list[Planned]:
    """An empty folder and those above it."""
    made = _Plan(Context(view), view, None, None)
    made.add_folder(path)
    return made.items
