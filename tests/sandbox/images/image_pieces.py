"""Images made on the spot, and a registry that serves them on loopback."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

CONFIG = {
    "Env": ["PATH=/bin", "COLOUR=blue=green"], "User": "1:2", "WorkingDir": "/srv", "Entrypoint": ["/bin/sh"],
    "Cmd": ["-c", "true"], "ExposedPorts": {"80/tcp": {}}, "Labels": {"a": "b"}, "Volumes": {"/data": {}},
}  # fmt: skip
OCI = "application/vnd.oci.image"


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, **{"type": tarfile.DIRTYPE, "mode": 0o755, **fields})


def link(name: str, target: str, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, **{"type": tarfile.SYMTYPE, "linkname": target, **fields})


def make_tar(members: Sequence[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def system_layer(*programs: str) -> bytes:
    """A small system of this machine's own programs, as the lowest layer of an image."""
    paths: dict[str, Path] = {}
    for name in ("sh", *programs):
        found = shutil.which(name)
        assert found is not None, name
        paths[f"bin/{name}"] = Path(found)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+)", listed):
            paths[library.lstrip("/")] = Path(library)
    folders = {str(parent) for path in paths for parent in list(Path(path).parents)[:-1]}
    folders |= {"tmp", "etc", "root", "proc"}
    return make_tar([
        *(folder(path) for path in sorted(folders)),
        *(member(path, source.resolve().read_bytes(), mode=0o755) for path, source in paths.items()),
        member("etc/passwd", b"root:x:0:0::/root:/bin/sh\nweb:x:33:44::/srv:/bin/sh\n"),
        member("etc/group", b"root:x:0:\nstaff:x:50:\n"), link("usr-link", "/usr/share"), folder("usr/share"),
    ])


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Image:
    """An OCI image in memory. ``compress`` is applied to each layer."""

    layers: Sequence[bytes]
    compress: Callable[[bytes], bytes] = lambda data: gzip.compress(data, 1)
    config: dict[str, object] = field(default_factory=lambda: dict(CONFIG))
    architecture: str = "amd64"

    def __post_init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        config = {"architecture": self.architecture, "os": "linux", "config": self.config,
                  "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in self.layers]}}
        manifest = {
            "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json",
            "config": self._blob(f"{OCI}.config.v1+json", json.dumps(config).encode()),
            "layers": [self._blob(f"{OCI}.layer.v1.tar+gzip", self.compress(layer)) for layer in self.layers],
        }  # fmt: skip
        self.manifest = json.dumps(manifest).encode()
        self.descriptor = self._blob(f"{OCI}.manifest.v1+json", self.manifest)

    def _blob(self, kind: str, data: bytes) -> dict[str, object]:
        self.blobs[sha256(data)] = data
        return {"mediaType": kind, "digest": sha256(data), "size": len(data)}

    def index(self, *others: Image, tag: str = "") -> bytes:
        named = {"annotations": {"org.opencontainers.image.ref.name": tag}} if tag else {}
        items = [
            {**image.descriptor, **named, "platform": {"os": "linux", "architecture": image.architecture}}
            for image in (self, *others)
        ]
        for image in others:
            self.blobs |= image.blobs
        return json.dumps({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": items}).encode()

    def write_layout(self, target: Path, *, tag: str = "") -> Path:
        for digest, data in self.blobs.items():
            place = target / "blobs" / digest.replace(":", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (target / "index.json").write_bytes(self.index(tag=tag))
        return target

    def saved(self, tag: str = "busy:1") -> bytes:
        """As ``docker save`` of old wrote it."""
        config = next(data for data in self.blobs.values() if b"diff_ids" in data)
        names = [f"layer{number}/layer.tar" for number in range(len(self.layers))]
        manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": names}]
        return make_tar([
            member("config.json", config),
            *(member(name, layer) for name, layer in zip(names, self.layers, strict=True)),
            member("manifest.json", json.dumps(manifest).encode()),
        ])


class Registry:
    """A registry with one repository for each image, optional tokens, and faults on request."""

    def __init__(
        self, images: dict[str, Image], *, index: bool = False, password: str = "", ranges: bool = True
    ) -> None:
        self.images = images
        self.index = index
        self.password = password
        self.ranges = ranges
        self.faults: list[Callable[[Request, bytes], Response]] = []  # each spoils one blob answer
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.app = Starlette(routes=[
            Route("/token", self.token), Route("/elsewhere/{digest}", self.elsewhere),
            Route("/v2/{name:path}/manifests/{tag}", self.manifest), Route("/v2/{name:path}/blobs/{digest}", self.blob),
        ])

    def refused(self, request: Request) -> Response | None:
        self.seen.append((request.url.path, dict(request.headers)))
        if not self.password or request.headers.get("authorization") == "Bearer good":
            return None
        challenge = f'Bearer realm="{request.url.replace(path="/token")}",service="test"'
        return Response(status_code=401, headers={"www-authenticate": challenge})

    async def token(self, request: Request) -> Response:
        given = base64.b64decode(request.headers.get("authorization", "").partition(" ")[2]).decode()
        good = given == f"me:{self.password}" and request.query_params["scope"].startswith("repository:")
        return JSONResponse({"token": "good"} if good else {}, 200 if good else 401)

    async def manifest(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        image = self.images.get(request.path_params["name"])
        tag = request.path_params["tag"]
        if image is None:
            return Response(status_code=404)
        data = image.blobs.get(tag, image.index() if self.index else image.manifest)
        return Response(data, headers={"docker-content-digest": sha256(data)})

    async def blob(self, request: Request) -> Response:
        if refused := self.refused(request):
            return refused
        data = self.images[request.path_params["name"]].blobs.get(request.path_params["digest"])
        if data is None:
            return Response(status_code=404)
        if self.faults:
            return self.faults.pop(0)(request, data)
        return self.part(request, data)

    def part(self, request: Request, data: bytes) -> Response:
        wanted = request.headers.get("range", "")
        if not wanted or not self.ranges:
            return Response(data)
        first, last = wanted.removeprefix("bytes=").split("-")
        piece = data[int(first) : int(last) + 1 if last else None]
        return Response(piece, 206, {"content-range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}"})

    async def elsewhere(self, request: Request) -> Response:
        self.seen.append((request.url.path, dict(request.headers)))
        blobs = {digest: data for image in self.images.values() for digest, data in image.blobs.items()}
        return self.part(request, blobs[request.path_params["digest"]])


@contextmanager
def serving(registry: Registry) -> Iterator[str]:
    """The registry's address while the block runs."""
    server = uvicorn.Server(uvicorn.Config(registry.app, port=0, log_level="critical", lifespan="off"))
    started = threading.Event()

    async def run() -> None:
        task = asyncio.get_running_loop().create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(30) and server.started
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def closing(request: Request, data: bytes) -> Response:
    """An answer that breaks off in the middle of the body."""

    async def half(scope: object, receive: object, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", str(len(data)).encode())]})
        await send({"type": "http.response.body", "body": data[: len(data) // 2], "more_body": True})
        raise ConnectionError("cut")

    class Half(Response):
        async def __call__(self, scope: object, receive: object, send: object) -> None:
            await half(scope, receive, send)  # type: ignore[arg-type]

    return Half()
