"""From an image somewhere to layers here.

Owns: which layers are missing, fetching several at once, and the check of the compressed bytes against the manifest
while they pass (the store checks the plain ones). Refuses: to keep anything whose content is not what was named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tandem.core.errors import SandboxError
from tandem.sandbox.images.compression import decompressed
from tandem.sandbox.images.manifest import Descriptor, ImageConfig, Manifest, layer_names, machine_platform, read_config
from tandem.sandbox.images.store import LayerStore

AT_ONCE = 3


class Source(Protocol):
    """Where an image comes from (``registry``, ``archive``)."""

    def manifest(self, platform: str) -> tuple[Manifest, str]: ...

    def read(self, blob: Descriptor) -> bytes: ...

    def stream(self, blob: Descriptor) -> Iterator[bytes]: ...


def pull(
    source: Source, store: LayerStore, *, what: str, platform: str = "", on_line: Callable[[str], None] | None = None
) -> ImageConfig:
    """Bring an image's layers into the store; the configuration names them (``diff_ids``, lowest first).

    Raises:
        SandboxError: broken, or not what its digests say. SandboxUnavailable, SandboxTimeout: as the source says.
    """
    say = on_line or (lambda line: None)
    manifest, _ = source.manifest(platform or machine_platform())
    config = read_config(source.read(manifest.config), what=what)
    blobs = layer_names(config, manifest, what=what)
    missing = {digest: blob for digest, blob in blobs.items() if store.find(digest) is None}
    say(f"{what}: {len(blobs)} layers, {len(blobs) - len(missing)} of them here")

    def fetch(digest: str, blob: Descriptor) -> None:
        store.add(digest, decompressed(_checked(source.stream(blob), blob, what), what=f"{what}: layer {digest}"))
        say(f"{what}: layer {digest[:19]} ({blob.size / 1e6:.1f} MB)")

    with ThreadPoolExecutor(AT_ONCE, "image-layer") as pool:
        jobs = [pool.submit(fetch, digest, blob) for digest, blob in missing.items()]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    return config


def _checked(pieces: Iterator[bytes], blob: Descriptor, what: str) -> Iterator[bytes]:
    """The stream as it is; after its last byte its digest must be right, or the layer is thrown away."""
    if not blob.digest:  # docker save: known by its plain content alone
        yield from pieces
        return
    algorithm, _, expected = blob.digest.partition(":")
    hasher = hashlib.new(algorithm)
    for piece in pieces:
        hasher.update(piece)
        yield piece
    if hasher.hexdigest() != expected:
        raise SandboxError(f"{what}: a layer is not what its digest {blob.digest} names")
