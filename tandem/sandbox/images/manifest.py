"""What an image says of itself: its manifest, the choice of a platform, and its configuration.

Owns: reading OCI and Docker (schema 2) documents into records. Refuses: schema 1, unknown layer formats.
Source: OCI image specification 1.1, "Image Manifest", "Image Index", "Image Configuration".
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import Annotated

import msgspec

from tandem.core.errors import SandboxError
from tandem.sandbox.images.reference import DIGEST

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le", "s390x": "s390x",
            "riscv64": "riscv64"}  # fmt: skip
MAX_BYTES = 8 << 20  # of one document


class Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    """A blob by its content. ``digest`` is empty only for the layers of a docker-save archive (known by their
    uncompressed content); ``place`` then names its member."""

    media_type: str = ""
    digest: str = ""
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    platform: Platform | None = None
    annotations: dict[str, str] = {}
    place: str = ""


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    config: Descriptor
    layers: list[Descriptor]
    media_type: str = ""
    annotations: dict[str, str] = {}


class Index(msgspec.Struct, frozen=True, rename="camel"):
    manifests: list[Descriptor]


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image says about commands run in it; grows by one step at a time while an image is built."""

    environment: dict[str, str] = {}
    user: str = ""
    folder: str = ""
    entrypoint: list[str] = []
    command: list[str] = []
    ports: list[str] = []
    volumes: list[str] = []
    labels: dict[str, str] = {}
    shell: list[str] = msgspec.field(default_factory=lambda: ["/bin/sh", "-c"])
    diff_ids: list[str] = []


class _Inner(msgspec.Struct, frozen=True, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    exposed_ports: dict[str, object] | None = None
    volumes: dict[str, object] | None = None
    labels: dict[str, str] | None = None
    shell: list[str] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Outer(msgspec.Struct, frozen=True):
    rootfs: _RootFs
    config: _Inner | None = None


def check_digest(data: bytes, digest: str, *, what: str) -> None:
    """Raises SandboxError when ``data`` is not what ``digest`` names."""
    if not DIGEST.fullmatch(digest):
        raise SandboxError(f"{what}: {digest!r} is no digest that we know")
    algorithm, _, expected = digest.partition(":")
    found = hashlib.new(algorithm, data).hexdigest()
    if found != expected:
        raise SandboxError(f"{what} is not what its digest {digest} names (its content has {found})")


def read_manifest(data: bytes, *, what: str) -> Manifest | Index:
    """Raises SandboxError for anything else than a manifest or an index of them."""
    if len(data) > MAX_BYTES:
        raise SandboxError(f"{what} has {len(data)} bytes, more than a manifest may have")
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "manifests" in fields:
            return msgspec.json.decode(data, type=Index)
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise SandboxError(f"{what} is no image manifest: {error}") from error
    for descriptor in (manifest.config, *manifest.layers):
        if not DIGEST.fullmatch(descriptor.digest):
            raise SandboxError(f"{what}: {descriptor.digest!r} is no digest that we know")
    return manifest


def machine_platform() -> str:
    """This machine as images call it: ``linux/amd64``."""
    machine = platform.machine()
    return f"linux/{MACHINES.get(machine, machine)}"


def choose(index: Index, wanted: str, *, what: str) -> Descriptor:
    """The manifest for a platform (``os/architecture[/variant]``).

    Raises:
        SandboxError: there is none; the message lists what there is.
    """
    system, _, rest = wanted.partition("/")
    architecture, _, variant = rest.partition("/")
    unnamed = [item for item in index.manifests if item.platform is None and item.media_type not in INDEXES]
    for item in index.manifests:
        found = item.platform
        if found and (found.os, found.architecture) == (system, architecture) and variant in ("", found.variant):
            return item
    if len(index.manifests) == 1 and unnamed:  # a layout with one image need not say for what
        return unnamed[0]
    known = sorted({f"{item.platform.os}/{item.platform.architecture}" for item in index.manifests if item.platform})
    raise SandboxError(f"{what} has no image for {wanted}", hint=f"it has: {', '.join(known) or 'none that says so'}")


def read_config(data: bytes, *, what: str) -> ImageConfig:
    try:
        outer = msgspec.json.decode(data, type=_Outer)
    except msgspec.MsgspecError as error:
        raise SandboxError(f"{what} has a configuration that cannot be read: {error}") from error
    for digest in outer.rootfs.diff_ids:
        if not DIGEST.fullmatch(digest):
            raise SandboxError(f"{what}: {digest!r} is no digest that we know")
    inner = outer.config or _Inner()
    return ImageConfig(
        environment={name: value for name, _, value in (item.partition("=") for item in inner.env or [])},
        user=inner.user or "",
        folder=inner.working_dir or "",
        entrypoint=inner.entrypoint or [],
        command=inner.cmd or [],
        ports=list(inner.exposed_ports or {}),
        volumes=list(inner.volumes or {}),
        labels=inner.labels or {},
        shell=inner.shell or ["/bin/sh", "-c"],
        diff_ids=outer.rootfs.diff_ids,
    )


def layer_names(config: ImageConfig, manifest: Manifest, *, what: str) -> Mapping[str, Descriptor]:
    """Uncompressed digest to blob, lowest layer first (a repeated layer once, at its first place).

    Raises:
        SandboxError: configuration and manifest disagree about how many layers there are.
    """
    if len(config.diff_ids) != len(manifest.layers):
        raise SandboxError(
            f"{what} lists {len(manifest.layers)} layers, but its configuration {len(config.diff_ids)}"
        )
    return dict(zip(config.diff_ids, manifest.layers, strict=True))
