"""From a registry on loopback to the first ``python3``: ``python benchmarks/image_start.py [--megabytes N]``.

The image is one gzip layer of this machine's own files. Each round starts from an empty store: pull, then
``python3 -c print(1)`` in the image, by way of
- indexed: the layer's tar stays a tar, with our EROFS index over it;
- lazy: the index comes first, the rest when it is read (plain layers with lazy parts, and a kernel with pre-content
  events); the layer then goes on filling behind it;
- unpacked: every file is written out.
The command runs in a chroot of the mounted image, so that the image alone is measured; a box adds its own creation
(see ``sandbox_latency.py``). Prints median and minimum in milliseconds. Needs root.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.pieces.image_registry import serving
from tandem.sandbox.images.lazy_parts import export_layout
from tandem.sandbox.images.manifest import ImageConfig, machine_platform
from tandem.sandbox.images.pull import pull
from tandem.sandbox.images.reference import ImageReference
from tandem.sandbox.images.registry import RegistryImage
from tandem.sandbox.images.store import FILLING, UNSETTLED, LayerStore
from tandem.sandbox.images.view import open_layer

FIRST = ("usr/lib64", "usr/bin", "usr/lib/python3", "usr/lib/python3.11", "usr/lib/x86_64-linux-gnu")
FILL = ("usr/include", "usr/share", "usr/lib")


def make_layer(target: Path, megabytes: int) -> tuple[int, int]:
    """A tar with python3 and what it needs first, then other files up to the size; its members and bytes."""
    names: list[str] = ["bin", "lib", "lib64"]
    left = megabytes << 20
    for top in (*FIRST, *FILL):
        for parent, folders, files in os.walk(f"/{top}"):
            folders.sort()
            for name in files:
                path = os.path.join(parent, name)
                status = os.lstat(path)
                needed = name.startswith(("python3", "ld-", "libc.", "libm.", "libz.", "libexpat."))
                if status.st_size > (left if not needed else 64 << 20):
                    continue
                left -= status.st_size + 512
                names.append(path.lstrip("/"))
    names = list(dict.fromkeys(names))
    listing = "\0".join(names).encode()
    command = ["tar", "-C", "/", "-cf", str(target), "--null", "-T", "-"]
    subprocess.run(command, input=listing, check=True, stderr=subprocess.DEVNULL)
    return len(names), target.stat().st_size


def make_lazy_image(layer: Path, folder: Path) -> None:
    """The same image with plain layers and lazy parts, as ``export_layout`` writes it."""
    store = LayerStore(folder / "origin")
    digest = store.add_file(layer).digest
    export_layout(store, ImageConfig(), [digest], folder / "layout", tag="latest")
    blobs = folder / "lazy-blobs"
    blobs.mkdir()
    for blob in (folder / "layout" / "blobs" / "sha256").iterdir():
        blob.rename(blobs / f"sha256:{blob.name}")
    image, parts = json.loads((folder / "layout" / "index.json").read_text())["manifests"]
    for name, item in (("manifest", image), ("manifest-latest.tandem-lazy", parts)):
        (blobs / name).hardlink_to(blobs / item["digest"])


def make_image(layer: Path, folder: Path) -> None:
    """The registry's blobs, one file each, and ``manifest``."""
    packed = folder / "packed"
    with layer.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as out:
        shutil.copyfileobj(source, out, 1 << 20)
    with layer.open("rb") as file:
        diff_id = hashlib.file_digest(file, "sha256").hexdigest()
    with packed.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = packed.stat().st_size
    packed.rename(folder / f"sha256:{digest}")
    system, _, architecture = machine_platform().partition("/")
    config = json.dumps({
        "os": system, "architecture": architecture,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
    }).encode()  # fmt: skip
    config_digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    (folder / config_digest).write_bytes(config)
    (folder / "manifest").write_text(json.dumps({
        "schemaVersion": 2, "config": {"digest": config_digest, "size": len(config)},
        "layers": [{"digest": f"sha256:{digest}", "size": size}],
    }))


def run_python(store: LayerStore, digest: str) -> None:
    layer = store.find(digest)
    assert layer is not None
    place = open_layer(layer)
    try:
        command = ["chroot", f"/proc/self/fd/{place}", "/usr/bin/python3", "-c", "print(1)"]
        done = subprocess.run(command, pass_fds=[place], capture_output=True)
        assert done.stdout == b"1\n", done.stderr.decode()
    finally:
        os.close(place)


def one_round(address: str, folder: Path, way: str) -> tuple[float, float]:
    """Seconds until the layer is ready and until python3 has run."""
    started = time.perf_counter()
    store = LayerStore(folder, indexed=way != "unpacked")
    with RegistryImage(ImageReference.parse(f"{address}/image")) as source:
        config = pull(source, store, what="image", lazily=way == "lazy")
    ready = time.perf_counter()
    run_python(store, config.diff_ids[0])
    done = time.perf_counter()
    deadline = time.monotonic() + 120
    unfinished = (FILLING,) if way == "unpacked" else (FILLING, UNSETTLED)
    # Not measured: the next round must not run beside the rest of the download, or the layer's way to the disk.
    while any(list(folder.glob(f"layers/*/{name}")) for name in unfinished):
        assert time.monotonic() < deadline, "the layer is not whole and on the disk after 120 s"
        time.sleep(0.05)
    return ready - started, done - started


def make_images(folder: Path, megabytes: int) -> str:
    """Both registries' blobs below ``folder``, unless an earlier run left them; what the image is."""
    note = folder / "made"
    if not note.exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "blobs").mkdir(parents=True)
        members, size = make_layer(folder / "layer.tar", megabytes)
        make_image(folder / "layer.tar", folder / "blobs")
        make_lazy_image(folder / "layer.tar", folder)
        (folder / "layer.tar").unlink()
        shutil.rmtree(folder / "origin")
        os.sync()  # else the first rounds share the disk with what was written here
        note.write_text(f"one layer: {members} members, {size / 1e6:.0f} MB")
    return note.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=560)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["lazy", "indexed", "unpacked"])
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache", help="on a disk, not a tmpfs")
    parser.add_argument("--images", type=Path, help="keep the image's blobs there, and use them when they are there")
    parser.add_argument("--only-images", action="store_true", help="make the blobs, measure nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="image-start-") as name:
        folder = Path(name)
        images = options.images or folder / "images"
        print(make_images(images, options.megabytes))
        if options.only_images:
            return
        times: dict[str, list[float]] = {}
        with serving(images / "blobs") as address, serving(images / "lazy-blobs") as lazy:
            for number in range(options.rounds):
                for way in options.ways:
                    store = folder / f"store-{way}-{number}"
                    ready, done = one_round(lazy if way == "lazy" else address, store, way)
                    times.setdefault(f"{way}: layer ready", []).append(ready * 1000)
                    times.setdefault(f"{way}: first python3 done", []).append(done * 1000)
                    shutil.rmtree(store)
    print(f"{'ms':<36}{'median':>9}{'minimum':>9}{'n':>4}")
    for what, values in times.items():
        print(f"{what:<36}{statistics.median(values):>9.0f}{min(values):>9.0f}{len(values):>4}")


if __name__ == "__main__":
    main()
