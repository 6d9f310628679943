"""From an image somewhere to layers here.

Owns: which layers are missing, and fetching several at once. What is kept is checked: the manifest's digest covers
the configuration, that names each layer by its plain content, and the store keeps nothing whose content is another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tandem.sandbox.images.compression import decompressed
from tandem.sandbox.images.manifest import Descriptor, ImageConfig, Manifest, layer_names, machine_platform, read_config
from tandem.sandbox.images.store import LayerStore

AT_ONCE = 3  # layers
PIECES_AHEAD = 8


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
        store.add(digest, decompressed(_ahead(source.stream(blob)), what=f"{what}: layer {digest}"))
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


def _ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, fetched in a thread a few ahead of their use, so that the network, decompression and the disk
    work at once."""
    end = b""
    with ThreadPoolExecutor(1, "image-stream") as pool:
        waiting = deque(pool.submit(next, pieces, end) for _ in range(PIECES_AHEAD))
        while piece := waiting.popleft().result():
            waiting.append(pool.submit(next, pieces, end))
            yield piece
