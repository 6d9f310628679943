"""Layers that fill while they are read: real kernel events, a real worker, SIGKILL."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from image_pieces import Image, Registry, make_tar, member, serving, sha256
from starlette.requests import Request
from starlette.responses import Response

from tandem.sandbox.backend import Layer
from tandem.sandbox.images.erofs_mount import can_mount_index
from tandem.sandbox.images.fanotify import can_watch
from tandem.sandbox.images.lazy import BACKGROUND
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.images.store import FILLING
from tandem.sandbox.images.view import open_layer

FIRST, LAST = os.urandom(3 << 20), os.urandom(3 << 20)
TAR = make_tar([member("first", FIRST), member("middle", os.urandom(6 << 20)), member("last", LAST)])


class SlowRegistry(Registry):
    """Serves an exported layout. Chunks of the middle wait for ``open``; ``spoil`` changes what is sent."""

    def __init__(self, layout: Path) -> None:
        super().__init__({})
        self.layout = layout
        self.open = asyncio.Event()
        self.num_waiting = 0  # requests that waited for it
        self.spoil: Callable[[bytes], bytes] = lambda data: data

    async def manifest(self, request: Request) -> Response:
        wanted = request.path_params["tag"]
        for item in json.loads((self.layout / "index.json").read_text())["manifests"]:
            if wanted in (item["annotations"]["org.opencontainers.image.ref.name"], item["digest"]):
                return Response(self.file(item["digest"]))
        return Response(status_code=404)

    def file(self, digest: str) -> bytes:
        return (self.layout / "blobs" / digest.replace(":", "/")).read_bytes()

    async def blob(self, request: Request) -> Response:
        wanted = request.headers.get("range", "")
        if wanted:
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            if (2 << 20) < first < (9 << 20):
                self.num_waiting += 1
                while not self.open.is_set():
                    await asyncio.sleep(0.01)
        answer = self.part(request, self.file(request.path_params["digest"]))
        return Response(self.spoil(answer.body), 206, answer.headers) if wanted else answer


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    if problem := can_mount_index(tmp_path) or can_watch(tmp_path):
        pytest.skip(problem)
    library = ImageLibrary(tmp_path / "origin")
    Image([TAR], compress=bytes).write_layout(tmp_path / "image")
    asyncio.run(library.load(tmp_path / "image", name="it"))
    asyncio.run(library.export("it", tmp_path / "layout", tag="1"))
    return tmp_path / "layout"


@contextmanager
def pulled(registry: SlowRegistry, folder: Path) -> Iterator[tuple[ImageLibrary, Layer]]:
    """A library with the image in it, pulled lazily; afterwards its layer is gone, and with it its processes."""
    library = ImageLibrary(folder)
    with serving(registry) as address:
        try:
            template = asyncio.run(library.pull(f"{address}/it:1"))
            layer = library.store.find(template.layers[0])
            assert layer is not None
            yield library, layer
        finally:
            registry.open.set()
            for process in workers(folder):
                os.kill(process, signal.SIGKILL)
            wait_until(lambda: not workers(folder), "its processes are gone")


def workers(folder: Path) -> list[int]:
    """Processes that work in a folder's layers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(folder)):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline, f"not reached: {what}"
        time.sleep(0.02)


def read(place: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=place), "rb") as file:
        return file.read()


def test_what_is_read_comes_first_and_the_rest_behind_it(layout, tmp_path):
    registry = SlowRegistry(layout)
    with pulled(registry, tmp_path / "new") as (library, layer):
        marker = layer.path.parent / FILLING
        place = open_layer(layer)
        try:
            assert read(place, "last") == LAST
            assert marker.exists() and not library.store.remove(layer.digest)  # the middle is held back
            registry.open.set()
            assert read(place, "first") == FIRST
            wait_until(lambda: not marker.exists(), "the layer is whole")
            wait_until(lambda: not workers(tmp_path / "new"), "worker and holder have ended")
            assert layer.device is not None and sha256(layer.device.read_bytes()) == layer.digest
        finally:
            os.close(place)


def test_a_dead_worker_gives_errors_never_zeros_and_the_layer_is_fetched_again(layout, tmp_path):
    registry = SlowRegistry(layout)
    with pulled(registry, tmp_path / "new") as (library, layer):
        place = open_layer(layer)
        try:
            assert read(place, "last")[:1] == LAST[:1]
            worker = min(workers(tmp_path / "new"))
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(OSError) as caught:
                read(place, "middle")
            assert caught.value.errno == errno.EIO
        finally:
            os.close(place)
        assert library.store.find(layer.digest) is None


def test_a_reader_whose_wish_the_dead_worker_had_taken_gets_an_error(layout, tmp_path):
    registry = SlowRegistry(layout)
    with ThreadPoolExecutor(4) as pool, pulled(registry, tmp_path / "new") as (_, layer):
        place = open_layer(layer)
        try:
            wait_until(lambda: registry.num_waiting == BACKGROUND, "the background waits for the middle")
            reading = [pool.submit(pread_at, place, offset) for offset in ((3 << 20), (5 << 20), (7 << 20))]
            wait_until(lambda: registry.num_waiting > BACKGROUND, "the worker asks for what is read")
            os.kill(min(workers(tmp_path / "new")), signal.SIGKILL)
            for one in reading:
                with pytest.raises(OSError) as caught:
                    one.result(timeout=30)
                assert caught.value.errno == errno.EIO
        finally:
            os.close(place)


def pread_at(place: int, offset: int) -> bytes:
    """A piece of the middle."""
    file = os.open("middle", os.O_RDONLY, dir_fd=place)
    try:
        return os.pread(file, 4096, offset - (3 << 20))
    finally:
        os.close(file)


def test_a_chunk_that_is_not_its_digest_is_an_error(layout, tmp_path):
    registry = SlowRegistry(layout)
    registry.spoil = lambda data: b"\0" * len(data)
    with pulled(registry, tmp_path / "new") as (_, layer):
        place = open_layer(layer)
        try:
            with pytest.raises(OSError) as caught:
                read(place, "last")
            assert caught.value.errno == errno.EIO
        finally:
            os.close(place)


def test_without_parts_the_layers_come_whole(layout, tmp_path):
    lines: list[str] = []
    library = ImageLibrary(tmp_path / "new")
    with serving(Registry({"it": Image([TAR], compress=bytes)})) as address:
        # the registry answers any tag with the image itself, which names no parts
        template = asyncio.run(library.pull(f"{address}/it:1", on_line=lines.append))
    layer = library.store.find(template.layers[0])
    assert layer is not None and not (layer.path.parent / FILLING).exists()
    assert any("come whole" in line for line in lines)
