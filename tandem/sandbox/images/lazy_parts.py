"""What an image needs beside it in a registry, so that a box starts before its layers are here.

Owns: the parts and their place: the image's layers are plain tars, and under the tag ``TAG.tandem-lazy`` a second
manifest names for each layer its index and the digests of its chunks. It names the image's manifest too, so parts of
another version are never used. Writing an image out in this form; reading the parts of one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import SandboxError
from tandem.sandbox.images.manifest import Descriptor, ImageConfig, Manifest, machine_platform
from tandem.sandbox.images.store import INDEX, TAR, LayerStore

CHUNK_BYTES = 1 << 20
SUFFIX = ".tandem-lazy"
LAYER, PART = "dev.tandem.layer", "dev.tandem.part"
IMAGE = "dev.tandem.image"
OCI = "application/vnd.oci"


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyParts:
    """Of one layer: blobs of its index and of its chunks' digests (32 bytes each, in order)."""

    index: Descriptor
    chunks: Descriptor


def export_layout(store: LayerStore, config: ImageConfig, digests: list[str], target: Path, *, tag: str) -> None:
    """Write an image of the store as an OCI layout with lazy parts; any tool that copies layouts can push it.

    Raises:
        SandboxError: this store unpacks its layers, so it has no tars.
    """
    target.mkdir(parents=True, exist_ok=True)
    blobs = _Blobs(target)
    layers, parts = [], []
    with store.using(digests) as held:
        for digest, layer in zip(digests, held, strict=True):
            if layer.device is None:
                raise SandboxError(f"layers are unpacked here ({store.why_unpacked}), so none can be exported")
            folder = layer.device.parent
            layers.append(blobs.add_file(f"{OCI}.image.layer.v1.tar", folder / TAR, digest))
            index = blobs.add(f"{OCI}.tandem.index", (folder / INDEX).read_bytes())
            chunks = blobs.add(f"{OCI}.tandem.chunks", _chunk_digests(folder / TAR))
            parts += [
                {**item, "annotations": {LAYER: digest, PART: part}}
                for part, item in (("index", index), ("chunks", chunks))
            ]
    system, _, architecture = machine_platform().partition("/")
    inner = {
        "Env": [f"{name}={value}" for name, value in config.environment.items()], "User": config.user,
        "WorkingDir": config.folder, "Entrypoint": config.entrypoint, "Cmd": config.command, "Labels": config.labels,
        "ExposedPorts": {port: {} for port in config.ports}, "Volumes": {volume: {} for volume in config.volumes},
    }  # fmt: skip
    whole = {"os": system, "architecture": architecture, "config": inner,
             "rootfs": {"type": "layers", "diff_ids": digests}}  # fmt: skip
    kind = f"{OCI}.image.manifest.v1+json"
    manifest = blobs.add(kind, _json({
        "schemaVersion": 2, "mediaType": kind, "layers": layers,
        "config": blobs.add(f"{OCI}.image.config.v1+json", _json(whole)),
    }))  # fmt: skip
    lazy = blobs.add(kind, _json({
        "schemaVersion": 2, "mediaType": kind, "layers": parts, "config": blobs.add(f"{OCI}.empty.v1+json", b"{}"),
        "annotations": {IMAGE: manifest["digest"]},
    }))  # fmt: skip
    name = "org.opencontainers.image.ref.name"
    named = [{**item, "annotations": {name: called}} for item, called in ((manifest, tag), (lazy, tag + SUFFIX))]
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (target / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": named}))


def read_parts(manifest: Manifest, image_digest: str) -> dict[str, LazyParts]:
    """By the layer's digest; empty when the parts belong to another image."""
    if manifest.annotations.get(IMAGE) != image_digest:
        return {}
    found: dict[str, dict[str, Descriptor]] = {}
    for blob in manifest.layers:
        found.setdefault(blob.annotations.get(LAYER, ""), {})[blob.annotations.get(PART, "")] = blob
    return {
        layer: LazyParts(index=parts["index"], chunks=parts["chunks"])
        for layer, parts in found.items() if {"index", "chunks"} <= set(parts)
    }  # fmt: skip


def _chunk_digests(tar: Path) -> bytes:
    out = bytearray()
    with tar.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            out += hashlib.sha256(chunk).digest()
    return bytes(out)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class _Blobs:
    def __init__(self, target: Path) -> None:
        self._folder = target / "blobs" / "sha256"
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (self._folder / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    def add_file(self, kind: str, path: Path, digest: str) -> dict[str, object]:
        place = self._folder / digest.removeprefix("sha256:")
        place.unlink(missing_ok=True)
        place.hardlink_to(path)
        return {"mediaType": kind, "digest": digest, "size": path.stat().st_size}
