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
from tandem.sandbox.images.fanotify import can_watch
from tandem.sandbox.images.lazy import Job, start_worker
from tandem.sandbox.images.lazy_parts import SUFFIX, read_parts
from tandem.sandbox.images.manifest import Descriptor, ImageConfig, Manifest, layer_names, machine_platform, read_config
from tandem.sandbox.images.registry import RegistryImage
from tandem.sandbox.images.store import LayerStore

AT_ONCE = 3  # layers
PIECES_AHEAD = 8


class Source(Protocol):
    """Where an image comes from (``registry``, ``archive``)."""

    def manifest(self, platform: str) -> tuple[Manifest, str]: ...

    def read(self, blob: Descriptor) -> bytes: ...

    def stream(self, blob: Descriptor) -> Iterator[bytes]: ...


def pull(
    source: Source,
    store: LayerStore,
    *,
    what: str,
    platform: str = "",
    lazily: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> ImageConfig:
    """Bring an image's layers into the store; the configuration names them (``diff_ids``, lowest first). ``lazily``:
    layers that can fill while they are read are not waited for (see ``lazy_parts`` for what their registry must have).

    Raises:
        SandboxError: broken, or not what its digests say. SandboxUnavailable, SandboxTimeout: as the source says.
    """
    say = on_line or (lambda line: None)
    manifest, digest = source.manifest(platform or machine_platform())
    config = read_config(source.read(manifest.config), what=what)
    blobs = layer_names(config, manifest, what=what)
    missing = {digest: blob for digest, blob in blobs.items() if store.find(digest) is None}
    say(f"{what}: {len(blobs)} layers, {len(blobs) - len(missing)} of them here")

    if lazily and missing and isinstance(source, RegistryImage):
        missing = _begin(source, store, missing, digest, say)

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


def _begin(
    source: RegistryImage, store: LayerStore, missing: dict[str, Descriptor], image_digest: str,
    say: Callable[[str], None],
) -> dict[str, Descriptor]:
    """Start all layers that can be lazy; those that cannot are left, and why is said."""
    reason = store.why_unpacked or can_watch(store.folder)
    companion = None if reason else source.companion(SUFFIX)
    parts = read_parts(companion, image_digest) if companion else {}
    rest: dict[str, Descriptor] = {}
    for digest, blob in missing.items():
        if digest != blob.digest or digest not in parts:
            rest[digest] = blob
            continue
        index, chunks = (source.read(part) for part in (parts[digest].index, parts[digest].chunks))
        job = Job(image=str(source.reference), layer=blob, chunks=chunks, allow=source.allow,
                  credentials=source.credentials)
        store.add_lazy(digest, blob.size, index, lambda folder, job=job: start_worker(job, folder))
        say(f"{source.reference}: layer {digest[:19]} comes as it is read ({blob.size / 1e6:.1f} MB)")
    if rest:
        say(f"{source.reference}: {len(rest)} layers come whole: {reason or 'the registry has no index of them'}")
    return rest


def _ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, fetched in a thread a few ahead of their use, so that the network, decompression and the disk
    work at once."""
    end = b""
    with ThreadPoolExecutor(1, "image-stream") as pool:
        waiting = deque(pool.submit(next, pieces, end) for _ in range(PIECES_AHEAD))
        while piece := waiting.popleft().result():
            waiting.append(pool.submit(next, pieces, end))
            yield piece
