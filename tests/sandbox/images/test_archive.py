from __future__ import annotations

import gzip
import json

import pytest
from image_pieces import Image, make_tar, member

from tandem.core.errors import SandboxError
from tandem.sandbox.images.archive import ArchiveImage

LAYER = make_tar([member("f", b"1")])


def test_what_is_no_image_is_refused(tmp_path):
    for name, data, said in (("tar", make_tar([member("x")]), "neither"), ("gz", gzip.compress(b"x"), "gunzip"),
                             ("text", b"hello" * 200, "no tar")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SandboxError) as caught, ArchiveImage(tmp_path / name) as image:
            image.manifest("linux/amd64")
        assert said in caught.value.message + caught.value.hint
    with pytest.raises(SandboxError, match="no image in"):
        ArchiveImage(tmp_path / "nothing")


def test_a_changed_blob_of_a_layout_is_noticed(tmp_path):
    layout = Image([LAYER]).write_layout(tmp_path / "layout")
    with ArchiveImage(layout) as image:
        manifest, _ = image.manifest("linux/amd64")
        (layout / "blobs" / manifest.config.digest.replace(":", "/")).write_text("{}")
        with pytest.raises(SandboxError, match="not what its digest"):
            image.read(manifest.config)


def test_several_images_are_told_apart_by_tag(tmp_path):
    one, two = Image([LAYER]), Image([LAYER, LAYER])
    layout = one.write_layout(tmp_path / "layout", tag="one")
    two.write_layout(layout, tag="two")
    items = [json.loads(image.index(tag=tag))["manifests"][0] for image, tag in ((one, "one"), (two, "two"))]
    (layout / "index.json").write_text(json.dumps({"manifests": items}))
    with ArchiveImage(layout, tag="two") as image:
        assert len(image.manifest("linux/amd64")[0].layers) == 2
    with pytest.raises(SandboxError, match="several") as caught, ArchiveImage(layout) as image:
        image.manifest("linux/amd64")
    assert "one, two" in caught.value.hint


def test_names_inside_a_layout_lead_nowhere_else(tmp_path):
    layout = Image([LAYER]).write_layout(tmp_path / "layout")
    (tmp_path / "secret").write_text("s")
    (layout / "manifest.json").write_text(json.dumps([{"Config": "../secret", "Layers": []}]))
    (layout / "index.json").unlink()
    with ArchiveImage(layout) as image, pytest.raises(SandboxError, match="leads out"):
        image.read(image.manifest("linux/amd64")[0].config)
