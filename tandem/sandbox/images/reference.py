"""Names of images: ``[registry/]repository[:tag][@digest]``, short ones meaning Docker Hub.

Owns: the grammar and its normal form. Source: the Docker reference grammar (distribution/reference).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.core.errors import ConfigError

HUB = "docker.io"
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
HOST = re.compile(r"(?:[A-Za-z0-9]+(?:[.-]+[A-Za-z0-9]+)*|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    registry: str  # host or host:port
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        """Raises ConfigError when ``text`` is no image name."""
        rest, _, digest = text.partition("@")
        if digest and not DIGEST.fullmatch(digest):
            raise ConfigError(f"{text!r}: {digest!r} is no digest", hint="write it as sha256: and 64 hex digits")
        head, slash, tail = rest.partition("/")
        if slash and ("." in head or ":" in head or head == "localhost"):
            registry, rest = head, tail
        else:
            registry = HUB
        repository, colon, tag = rest.partition(":")
        if registry in (HUB, "index.docker.io"):
            registry = HUB
            repository = repository if "/" in repository else f"library/{repository}"
        parts = HOST.fullmatch(registry) and REPOSITORY.fullmatch(repository)
        if not parts or (colon and not TAG.fullmatch(tag)):
            raise ConfigError(f"{text!r} is no image name", hint="write it as [registry/]name[:tag][@digest]")
        return cls(registry=registry, repository=repository, tag=tag or ("" if digest else "latest"), digest=digest)

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"

    @property
    def host(self) -> str:
        """Where the registry's API is."""
        return "registry-1.docker.io" if self.registry == HUB else self.registry

    @property
    def loopback(self) -> bool:
        return is_loopback(self.registry)

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def is_loopback(host: str) -> bool:
    return re.sub(r":\d+$", "", host) in LOOPBACK
