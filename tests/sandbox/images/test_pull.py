from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard
from image_pieces import Image, Registry, folder, make_tar, member, serving, sha256
from starlette.responses import Response

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import LayerKind
from tandem.sandbox.images.archive import ArchiveImage
from tandem.sandbox.images.pull import pull
from tandem.sandbox.images.reference import ImageReference
from tandem.sandbox.images.registry import RegistryImage
from tandem.sandbox.images.store import LayerStore

LAYERS = [make_tar([folder("d"), member("d/one", b"1" * 3000)]), make_tar([member("d/two", b"2"), member("d/.wh.one")])]


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store", indexed=False)


@contextmanager
def at_registry(registry: Registry) -> Iterator[RegistryImage]:
    with serving(registry) as address, RegistryImage(ImageReference.parse(f"{address}/a")) as source:
        yield source


@pytest.mark.parametrize("compress", [lambda data: gzip.compress(data, 1), zstandard.compress, bytes])
def test_from_a_registry(compress, store):
    with at_registry(Registry({"a": Image(LAYERS, compress=compress)})) as source:
        config = pull(source, store, what="a", platform="linux/amd64")
        lines: list[str] = []
        pull(source, store, what="a", platform="linux/amd64", on_line=lines.append)
    assert lines == ["a: 2 layers, 2 of them here"]
    assert config.diff_ids == [sha256(layer) for layer in LAYERS]
    assert config.environment == {"PATH": "/bin", "COLOUR": "blue=green"} and config.folder == "/srv"
    assert (config.user, config.entrypoint, config.ports, config.volumes) == ("1:2", ["/bin/sh"], ["80/tcp"], ["/data"])
    layer = store.find(config.diff_ids[0])
    assert layer is not None and layer.kind is LayerKind.FOLDER
    assert (layer.path / "d/one").read_bytes() == b"1" * 3000


def test_a_layer_with_other_content_is_not_kept(store):
    image = Image(LAYERS)
    registry = Registry({"a": image})
    with at_registry(registry) as source:
        for blob in source.manifest("linux/amd64")[0].layers:
            other = make_tar([member("other", os.urandom(int(len(image.blobs[blob.digest]) / 2)))])
            image.blobs[blob.digest] = other[: blob.size].ljust(blob.size, b"\0")
        with pytest.raises(SandboxError):
            pull(source, store, what="a", platform="linux/amd64")
        assert [path.name for path in (store.folder / "layers").iterdir() if not path.name.startswith(".")] == []


def test_a_configuration_that_lies_about_a_layer_poisons_nothing(store):
    """The blob is what the manifest names, but its plain content is not what the configuration calls it."""
    image = Image(LAYERS)
    lying = Image([LAYERS[1], LAYERS[0]])
    honest = {sha256(layer): layer for layer in LAYERS}
    lying.blobs |= image.blobs
    text = lying.manifest.decode()
    layers = [item["digest"] for item in json.loads(text)["layers"]]
    swapped = text.replace(layers[0], "X").replace(layers[1], layers[0]).replace("X", layers[1])
    sizes = {digest: len(lying.blobs[digest]) for digest in layers}
    fields = json.loads(swapped)
    for item in fields["layers"]:
        item["size"] = sizes[item["digest"]]
    lying.manifest = json.dumps(fields).encode()
    with at_registry(Registry({"a": lying})) as source, pytest.raises(SandboxError, match="not what its digest names"):
        pull(source, store, what="a", platform="linux/amd64")
    assert all(store.find(digest) is None for digest in honest)


def test_a_blob_that_is_too_long_is_refused(store):
    image = Image(LAYERS)
    registry = Registry({"a": image})
    with at_registry(registry) as source:
        registry.faults = [lambda request, data: Response(data)] + [
            lambda request, data: Response(data + b"more") for _ in range(2)]
        with pytest.raises(SandboxError, match="longer than"):
            pull(source, store, what="a", platform="linux/amd64")


@pytest.mark.parametrize("form", ["layout", "layout tar", "docker save"])
def test_from_files(form, store, tmp_path):
    image = Image(LAYERS)
    place = tmp_path / "image"
    if form == "docker save":
        place.write_bytes(image.saved())
    else:
        layout = image.write_layout(tmp_path / "layout", tag="busy:1")
        names = [path for path in sorted(layout.rglob("*")) if path.is_file()]
        place = layout if form == "layout" else place
        if form == "layout tar":
            place.write_bytes(make_tar([member(str(path.relative_to(layout)), path.read_bytes()) for path in names]))
    for tag in ("", "1", "busy:1"):
        with ArchiveImage(place, tag=tag) as source:
            config = pull(source, store, what="it", platform="linux/amd64")
        assert config.diff_ids == [sha256(layer) for layer in LAYERS] and config.user == "1:2"
    assert store.find(config.diff_ids[1]) is not None
