"""The files of a root as a box would see them, read without a box.

Owns: what overlayfs does (upper layers hide lower ones, whiteouts, opaque folders) and following links inside the
root, never out of it. Needed where a build must know what is there: through which link a COPY goes, which folders
exist, what ``COPY --from`` takes. Refuses: to show more of the host than its ``/usr`` and the links into it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Layer, LayerKind
from tandem.sandbox.images.erofs_mount import mount_erofs

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MAX_LINKS = 40
HOST_NAMES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True, slots=True)
class Found:
    """A file of the root: its clean path and the layer that shows it."""

    path: str
    place: int  # descriptor of the layer's top folder
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)


class View:
    """A root, open for reading; close it with its block."""

    def __init__(self, layers: Sequence[Layer], *, host_base: bool) -> None:
        """``layers`` top first."""
        self._places: list[int] = []
        self._host = -1
        self._folders: dict[str, list[int]] = {}
        try:
            for layer in layers:
                self._places.append(open_layer(layer))
            if host_base:
                self._host = os.open("/", FOLDER)
                self._places.append(self._host)
        except BaseException:
            self.close()
            raise
        self._folders[""] = list(self._places)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._places:
            os.close(self._places.pop())

    def resolve(self, path: str, *, follow_last: bool = True) -> str:
        """The clean path that ``path`` means, links followed; what is missing on the way stays as written.

        Raises:
            SandboxError: links that never end.
        """
        done: list[str] = []
        rest = [part for part in path.split("/") if part not in ("", ".")][::-1]
        followed = 0
        while rest:
            part = rest.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            found = self._lookup("/".join(done), part)
            if found is not None and found.is_link and (rest or follow_last):
                followed += 1
                if followed > MAX_LINKS:
                    raise SandboxError(f"the links of {path} in the image never end")
                target = os.readlink(found.path, dir_fd=found.place)
                if target.startswith("/"):
                    done = []
                rest += target.split("/")[::-1]
                continue
            done.append(part)
        return "/".join(done)

    def find(self, path: str) -> Found | None:
        """What is at a clean path, links not followed; '' is the root itself."""
        if not path:
            return Found(".", self._places[0], os.fstat(self._places[0])) if self._places else None
        parent, _, name = path.rpartition("/")
        return self._lookup(parent, name)

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder."""
        shown: dict[str, bool] = {}
        for place in self._contributing(path):
            for name in _listed(place, path):
                if name not in shown and not (place == self._host and not path and name not in HOST_NAMES):
                    status = os.stat(_join(path, name), dir_fd=place, follow_symlinks=False)
                    shown[name] = not _is_whiteout(status)
        return sorted(name for name, there in shown.items() if there)

    def read(self, found: Found) -> bytes:
        """A regular file's bytes."""
        with open(os.open(found.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found.place), "rb") as file:
            return file.read()

    def _lookup(self, parent: str, name: str) -> Found | None:
        for place in self._contributing(parent):
            if place == self._host and not parent and name not in HOST_NAMES:
                continue
            try:
                status = os.stat(_join(parent, name), dir_fd=place, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue
            return None if _is_whiteout(status) else Found(_join(parent, name), place, status)
        return None

    def _contributing(self, path: str) -> list[int]:
        """The layers whose folder at ``path`` shows through, top first. Every prefix is known to be a folder in
        them, so a plain path never passes a link."""
        if path in self._folders:
            return self._folders[path]
        parent, _, name = path.rpartition("/")
        found: list[int] = []
        for place in self._contributing(parent):
            if place == self._host and not parent and name not in HOST_NAMES:
                continue
            try:
                status = os.stat(path, dir_fd=place, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISDIR(status.st_mode):
                break
            found.append(place)
            if is_opaque(place, path):
                break
        self._folders[path] = found
        return found


def open_layer(layer: Layer) -> int:
    """The top folder of a layer as a descriptor.

    Raises:
        SandboxError: it is broken or cannot be mounted.
    """
    try:
        if layer.kind is LayerKind.FOLDER:
            return os.open(layer.path, FOLDER)
        return mount_erofs(layer.path, device=layer.device)
    except OSError as error:
        raise SandboxError(f"the layer {layer.path} cannot be read: {error}") from error


def is_opaque(place: int, path: str) -> bool:
    descriptor = os.open(path, FOLDER | os.O_NOFOLLOW, dir_fd=place)
    try:
        for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
            try:
                if os.getxattr(descriptor, name) == b"y":
                    return True
            except OSError:
                continue
        return False
    finally:
        os.close(descriptor)


def _listed(place: int, path: str) -> list[str]:
    descriptor = os.open(path or ".", FOLDER, dir_fd=place)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
