from __future__ import annotations

import pytest
from image_pieces import Image, Registry, closing, make_tar, member, serving
from starlette.responses import RedirectResponse, Response

from tandem.core.errors import SandboxError, SandboxTimeout, SandboxUnavailable
from tandem.sandbox.images.manifest import Descriptor
from tandem.sandbox.images.reference import ImageReference
from tandem.sandbox.images.registry import RegistryImage

LAYER = make_tar([member("f", bytes(range(256)) * 12_000)])


def opened(address: str, name: str = "team/app", **options) -> RegistryImage:
    return RegistryImage(ImageReference.parse(f"{address}/{name}"), **{"timeout_s": 20.0, **options})


def only_layer(image: RegistryImage) -> Descriptor:
    return image.manifest("linux/amd64")[0].layers[0]


def test_manifest_and_blobs_by_platform_and_token():
    arm = Image([make_tar([member("arm")])], architecture="arm64")
    image = Image([LAYER])
    image.index(arm)
    registry = Registry({"team/app": image}, index=True, password="secret")
    registry.images["team/app"].index = lambda *others, tag="": Image.index(image, arm)  # both platforms
    with serving(registry) as address:
        credentials = {address: ("me", "secret")}
        with opened(address, credentials=credentials) as source:
            blob = only_layer(source)
            assert b"".join(source.stream(blob)) == image.blobs[blob.digest]
            assert source.read_range(blob, 5, 7) == image.blobs[blob.digest][5:12]
            assert source.manifest("linux/arm64")[0] != source.manifest("linux/amd64")[0]
            with pytest.raises(SandboxError, match="no image for linux/s390x") as caught:
                source.manifest("linux/s390x")
            assert "linux/amd64" in caught.value.hint
        with opened(address) as source, pytest.raises(SandboxUnavailable, match="does not let us"):
            source.manifest("linux/amd64")
        with opened(address, "no/such", credentials=credentials) as other, pytest.raises(SandboxError, match="no im"):
            other.manifest("linux/amd64")


def test_a_broken_stream_is_taken_up_where_it_broke():
    for ranges in (True, False):
        registry = Registry({"team/app": Image([LAYER], compress=bytes)}, ranges=ranges)
        registry.faults = [closing, lambda request, data: Response(status_code=503)]
        with serving(registry) as address, opened(address) as source:
            assert b"".join(source.stream(only_layer(source))) == LAYER
        again = [headers.get("range", "") for path, headers in registry.seen if "/blobs/" in path]
        assert again[0] == "" and again[-1].startswith("bytes=") and int(again[-1][6:-1]) > 0


def test_a_blob_may_lie_elsewhere_but_the_secret_stays():
    image = Image([LAYER])
    registry = Registry({"team/app": image}, password="secret")
    store = Registry({"team/app": image})
    with (
        serving(store) as other, serving(registry) as address,
        opened(address, credentials={address: ("me", "secret")}) as source,
    ):  # fmt: skip
        blob = only_layer(source)
        registry.faults = [lambda request, data: RedirectResponse(f"http://{other}/elsewhere/{blob.digest}")]
        assert b"".join(source.stream(blob)) == image.blobs[blob.digest]
        registry.faults = [lambda request, data: RedirectResponse(f"http://example.invalid/{blob.digest}")]
        with pytest.raises(SandboxError, match="not safe"):
            list(source.stream(blob))
    assert [("authorization" in headers) for _, headers in store.seen] == [False]


def test_only_allowed_registries_are_asked():
    with pytest.raises(SandboxUnavailable, match="not allowed") as caught:
        opened("evil.example.org", allow=("*.example.com", "docker.io"))
    assert "docker.io" in caught.value.hint
    opened("reg.example.com", allow=("*.example.com",))


def test_a_manifest_that_is_not_its_digest_is_refused():
    image = Image([LAYER])
    with serving(Registry({"team/app": image})) as address:
        image.blobs["sha256:" + "0" * 64] = image.manifest
        with opened(address, f"team/app@sha256:{'0' * 64}") as source, pytest.raises(SandboxError, match="not what"):
            source.manifest("linux/amd64")


def test_a_registry_that_never_answers_well_ends_at_the_deadline():
    registry = Registry({"team/app": Image([LAYER])})
    registry.faults = [lambda request, data: Response(status_code=503)] * 1000
    with serving(registry) as address, opened(address, timeout_s=0.5) as source:
        blob = only_layer(source)
        with pytest.raises(SandboxTimeout, match="still missing: blob sha256"):
            list(source.stream(blob))


def test_a_registry_without_ranges_says_so():
    with serving(Registry({"team/app": Image([LAYER])}, ranges=False)) as address, opened(address) as source:
        blob = only_layer(source)
        with pytest.raises(SandboxUnavailable, match="no parts"):
            source.read_range(blob, 0, 10)
