"""Images in files: an OCI layout (a folder or a tar of one) and what ``docker save`` writes.

Owns: finding documents and blobs in them. A tar is never unpacked: its members are read where they are.
Source: OCI image specification, "Image Layout"; Docker image specification 1.2, "Combined Image JSON".
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem.core.errors import SandboxError
from tandem.sandbox.images import manifest as documents
from tandem.sandbox.images.manifest import Descriptor, Index, Manifest
from tandem.sandbox.images.tar_reader import read_tar

PIECE = 1 << 20
TAG = "org.opencontainers.image.ref.name"


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class ArchiveImage:
    """One image of a file or folder. Blocking; several threads may read at once."""

    def __init__(self, path: Path, *, tag: str = "") -> None:
        """``tag`` chooses among several images; without it there must be one.

        Raises:
            SandboxError: nothing there, or no image.
        """
        self._path = path
        self._tag = tag
        self._members: dict[str, tuple[int, int]] | None = None
        self._map: mmap.mmap | None = None
        if path.is_dir():
            return
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise SandboxError(f"no image in {path}: {error}") from error
        if self._map[:2] == b"\x1f\x8b":
            raise SandboxError(f"{path} is compressed as a whole", hint=f"gunzip it first: gunzip -k {path}")
        links: dict[str, str] = {}
        self._members = {}
        for entry in read_tar(self._map, name=str(path)):
            name = entry.path.decode("utf-8", "replace")
            if entry.link:  # docker save of old: a layer that several images share
                folder = name.rpartition("/")[0]
                links[name] = _join(folder, entry.link.decode("utf-8", "replace"))
            else:
                self._members[name] = (entry.offset, entry.size)
        for name, target in links.items():
            if target in self._members:
                self._members[name] = self._members[target]

    def __enter__(self) -> ArchiveImage:
        return self

    def __exit__(self, *_: object) -> None:
        if self._map is not None:
            self._map.close()

    def manifest(self, platform: str) -> tuple[Manifest, str]:
        what = str(self._path)
        if self._has("index.json"):
            index = documents.read_manifest(self._read("index.json"), what=what)
            digest = ""
            for _ in range(4):  # an index may hold indexes
                if not isinstance(index, Index):
                    return index, digest
                chosen = documents.choose(self._tagged(index), platform, what=what)
                digest = chosen.digest
                index = documents.read_manifest(self.read(chosen), what=what)
            raise SandboxError(f"{what}: an index inside an index inside an index")
        if self._has("manifest.json"):
            return self._saved(what)
        raise SandboxError(f"{what} is no image: neither index.json nor manifest.json is in it")

    def read(self, blob: Descriptor) -> bytes:
        data = self._read(self._place(blob))
        if blob.digest:
            documents.check_digest(data, blob.digest, what=str(self._path))
        return data

    def stream(self, blob: Descriptor) -> Iterator[bytes]:
        name = self._place(blob)
        if self._map is not None:
            offset, size = self._member(name)
            for start in range(offset, offset + size, PIECE):
                yield self._map[start : min(start + PIECE, offset + size)]
            return
        with self._file(name).open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    def _tagged(self, index: Index) -> Index:
        """The one that is asked for, if there are several with names; a nested index passes whole."""
        if self._tag:
            named = [item for item in index.manifests if _names(item.annotations.get(TAG, ""), self._tag)]
            return Index(manifests=named) if named else index
        names = {item.annotations[TAG] for item in index.manifests if TAG in item.annotations}
        if len(names) > 1:
            raise SandboxError(f"{self._path} holds several images", hint=f"choose one: {', '.join(sorted(names))}")
        nested = [item for item in index.manifests if item.media_type in documents.INDEXES and item.platform is None]
        if len(nested) == 1 == len(index.manifests):
            return Index(manifests=[Descriptor(digest=nested[0].digest, size=nested[0].size)])
        return index

    def _saved(self, what: str) -> tuple[Manifest, str]:
        try:
            images = msgspec.json.decode(self._read("manifest.json"), type=list[_Saved])
        except msgspec.MsgspecError as error:
            raise SandboxError(f"{what} has a manifest.json that cannot be read: {error}") from error
        if self._tag:
            images = [image for image in images if any(_names(tag, self._tag) for tag in image.repo_tags or [])]
        if len(images) != 1:
            raise SandboxError(f"{what} holds {len(images)} images that fit; name one by its tag")
        layers = [Descriptor(place=name, size=self._member(name)[1]) for name in images[0].layers]
        return Manifest(config=Descriptor(place=images[0].config), layers=layers), ""

    def _place(self, blob: Descriptor) -> str:
        return blob.place or "blobs/" + blob.digest.replace(":", "/", 1)

    def _has(self, name: str) -> bool:
        return name in self._members if self._members is not None else self._file(name).is_file()

    def _member(self, name: str) -> tuple[int, int]:
        if self._members is None:
            return 0, self._file(name).stat().st_size
        if name not in self._members:
            raise SandboxError(f"{self._path} lacks {name}")
        return self._members[name]

    def _read(self, name: str) -> bytes:
        if self._member(name)[1] > documents.MAX_BYTES:
            raise SandboxError(f"{self._path}: {name} is too large for its kind")
        if self._map is not None:
            offset, size = self._member(name)
            return self._map[offset : offset + size]
        return self._file(name).read_bytes()

    def _file(self, name: str) -> Path:
        path = (self._path / name).resolve()
        if not path.is_relative_to(self._path.resolve()):
            raise SandboxError(f"{self._path}: {name} leads out of the image")
        return path


def _names(found: str, wanted: str) -> bool:
    return bool(found) and (found == wanted or found.rpartition(":")[2] == wanted)


def _join(folder: str, target: str) -> str:
    parts = folder.split("/") if folder else []
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)
