"""A layer that fills while it is read: its worker, a process of its own that outlives whoever asked for it.

Owns: the sparse tar of one layer from its first read to its last byte. Who reads what is not there yet waits until
the chunk has come and its digest was right; in the background all the rest comes. When all is there, the whole is
checked against the layer's digest, and its index against one made anew, before the watch ends.
The trap: when the last descriptor of a watch closes, the kernel lets every reader through, to zeros. So a second
process holds one: if the worker dies, the holder answers every reader with an error, and nobody ever reads zeros.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from tandem.core.errors import SandboxError, SandboxTimeout, TandemError
from tandem.sandbox.images import fanotify
from tandem.sandbox.images.erofs_writer import write_erofs
from tandem.sandbox.images.fanotify import Access
from tandem.sandbox.images.lazy_parts import CHUNK_BYTES
from tandem.sandbox.images.manifest import Descriptor
from tandem.sandbox.images.reference import ImageReference
from tandem.sandbox.images.registry import RegistryImage
from tandem.sandbox.images.store import FILLING, INDEX, TAR, UNSETTLED
from tandem.sandbox.images.tar_reader import read_tar
from tandem.sandbox.images.tree import build_tree

READERS, BACKGROUND = 8, 2  # threads
START_TIMEOUT_S = 20.0
FILL_TIMEOUT_S = 24 * 3600.0
HOLDER_LOOKS_S = 1.0
YIELD_S = 1.0  # how long the background steps back for readers, at most
PAUSE_S = 0.1  # who starts a program reads, computes and reads again: the background waits for a gap of this length
# Without the command line of httpx, which brings libraries of terminals along: a third of the time to start.
PROGRAM = "import sys; sys.modules['httpx._main'] = None; from tandem.sandbox.images.lazy import main; main()"
READY, DONE = b"ready\n", b"d"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told, on its stdin. Nothing of it is kept. It works in the layer's folder, wherever that is
    moved."""

    image: str
    layer: Descriptor
    chunks: bytes
    allow: list[str]
    credentials: dict[str, tuple[str, str]]


def start_worker(job: Job, folder: Path) -> None:
    """Start the worker of the layer in ``folder``; returns when its tar may be opened and mounted.

    Raises:
        SandboxError: it ended. SandboxTimeout: it is not ready in time.
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert worker.stdin is not None and worker.stdout is not None
    with worker.stdin, worker.stdout:
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(msgspec.json.encode(job))
            worker.stdin.close()
        ready, _, _ = select.select([worker.stdout], [], [], START_TIMEOUT_S)
        line = worker.stdout.readline() if ready else b""
    if line != READY:
        worker.kill()
        worker.wait()
        if not ready:
            raise SandboxTimeout(f"a lazy layer's worker was not ready after {START_TIMEOUT_S:g} s")
        raise SandboxError(f"a lazy layer's worker ended: {line.decode('utf-8', 'replace').strip() or 'no reason'}")
    threading.Thread(target=worker.wait, daemon=True, name="lazy-reap").start()


class Filler:
    """The chunks of one tar: which are there, and how the others come."""

    def __init__(self, job: Job, source: RegistryImage, file: int) -> None:
        self._job = job
        self._source = source
        self._file = file
        self._coming: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._num_reading = 0
        self._read_last = time.monotonic()  # whoever asked for the layer begins to read soon
        self._idle = threading.Event()  # nobody waits for a chunk
        self._idle.set()
        self.count = -(-job.layer.size // CHUNK_BYTES)

    def ensure(self, chunk: int) -> None:
        """Returns when a chunk is there and right. One thread fetches it, others wait for the same.

        Raises:
            TandemError: it cannot be fetched or is not what its digest says; asked again, it is tried again.
        """
        with self._lock:
            coming = self._coming.get(chunk)
            mine = coming is None
            if coming is None:
                coming = self._coming[chunk] = Future()
        if mine:
            try:
                self._fetch(chunk)
            except BaseException as error:
                with self._lock:
                    del self._coming[chunk]
                coming.set_exception(error)
            else:
                coming.set_result(None)
        coming.result()

    def cover(self, offset: int, count: int) -> None:
        """All chunks that a read touches."""
        end = min(offset + count, self._job.layer.size)
        with self._lock:
            self._num_reading += 1
            self._idle.clear()
        try:
            for chunk in range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
                self.ensure(chunk)
        finally:
            with self._lock:
                self._num_reading -= 1
                self._read_last = time.monotonic()
                if not self._num_reading:
                    self._idle.set()

    def fill(self, chunk: int) -> str:
        """A chunk that nobody waits for, after those that somebody does; what was wrong ('' for nothing)."""
        deadline = time.monotonic() + YIELD_S
        while (now := time.monotonic()) < deadline:
            if not self._idle.wait(deadline - now):
                break
            rest = self._read_last + PAUSE_S - time.monotonic()
            if rest <= 0:
                break
            time.sleep(rest)
        try:
            self.ensure(chunk)
        except (TandemError, OSError) as error:
            return str(error)
        return ""

    def _fetch(self, chunk: int) -> None:
        start = chunk * CHUNK_BYTES
        data = self._source.read_range(self._job.layer, start, min(CHUNK_BYTES, self._job.layer.size - start))
        if hashlib.sha256(data).digest() != self._job.chunks[chunk * 32 : chunk * 32 + 32]:
            raise SandboxError(f"chunk {chunk} of layer {self._job.layer.digest} is not what its digest names")
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, start + len(data) - len(rest))
            rest = rest[written:]


def serve(job: Job, group: int, file: int) -> None:
    """Answer readers until the layer is whole and right; then return. Never returns for one that is wrong: its
    readers get errors for as long as it is there."""
    with RegistryImage(
        ImageReference.parse(job.image), allow=job.allow, credentials=job.credentials, timeout_s=FILL_TIMEOUT_S
    ) as source:
        filler = Filler(job, source, file)
        readers = ThreadPoolExecutor(READERS, "lazy-read")
        wrong = threading.Event()

        def react(access: Access) -> None:
            good = not wrong.is_set()
            try:
                if good:
                    filler.cover(access.offset, access.count)
            except (TandemError, OSError):
                good = False
            fanotify.answer(group, access, allow=good)

        def listen() -> None:
            while True:
                for access in fanotify.read_events(group):
                    if access.pid == os.getpid():  # our own writes
                        fanotify.answer(group, access, allow=True)
                    else:
                        readers.submit(react, access)

        threading.Thread(target=listen, daemon=True, name="lazy-events").start()
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        with ThreadPoolExecutor(BACKGROUND, "lazy-fill") as pool:
            problems = [problem for problem in pool.map(filler.fill, range(filler.count)) if problem]
        os.fsync(file)
        if problems or not _is_right(job, file):
            wrong.set()
            while _is_there():
                time.sleep(HOLDER_LOOKS_S)


def _is_right(job: Job, file: int) -> bool:
    """The whole tar by the layer's digest, and the index by one made from it. Read through the descriptor that is not
    watched: a page fault that waited for an answer would hold the interpreter that must give it."""
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as data:
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != job.layer.digest:
            return False
        own = write_erofs(build_tree(read_tar(data)).root, device_bytes=max(job.layer.size, 1024))
    return own == Path(INDEX).read_bytes()


def _is_there() -> bool:
    """Whether the folder that we work in still has a name."""
    return os.stat(".").st_nlink > 0


def hold(group: int, pipe: int) -> None:
    """The second process: waits for the worker. If that dies unfinished, every reader gets an error from here."""
    if os.read(pipe, 1) == DONE:
        return
    fanotify.refuse_taken(group)  # what the worker knew of when it died; all its threads are gone by now
    while _is_there():
        ready, _, _ = select.select([group], [], [], HOLDER_LOOKS_S)
        if ready:
            for access in fanotify.read_events(group):
                fanotify.answer(group, access, allow=False)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    marker = os.open(FILLING, os.O_RDWR | os.O_CLOEXEC)  # its lock says that the worker lives
    fcntl.flock(marker, fcntl.LOCK_EX)
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(folder, fcntl.LOCK_SH)  # not evicted meanwhile
    file = os.open(TAR, os.O_RDWR | os.O_CLOEXEC)
    group = fanotify.open_group()
    fanotify.mark(group, Path(TAR))
    theirs, ours = os.pipe()
    if os.fork() == 0:
        for descriptor in (marker, folder, file, ours, 0, 1):
            os.close(descriptor)
        hold(group, theirs)
        os._exit(0)
    os.close(theirs)
    serve(job, group, file)
    fanotify.mark(group, Path(TAR), remove=True)
    Path(FILLING).unlink()
    Path(UNSETTLED).unlink(missing_ok=True)
    os.write(ours, DONE)
    os._exit(0)  # the thread that listens waits for ever

