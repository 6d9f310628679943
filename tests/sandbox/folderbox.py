"""A backend whose box is a folder and one real process: no isolation, all verbs, and it survives its server.

For tests of what stands on a backend. ``faults`` names verbs that fail, ``slow`` verbs that wait for ``go_on``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tandem.core.boxes import Isolation, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable
from tandem.sandbox.abilities import Ability
from tandem.sandbox.backend import HOME, Call, CallKind, Layer, Outcome, Root, Usage


class FolderFrozen:
    def __init__(self, folder: Path, released: list[Path], *, live: bool) -> None:
        self.folder = folder
        self.live = live
        self._released = released

    @property
    def root(self) -> Root:
        assert self.folder.exists(), "used after its release"
        return Root(layers=(Layer(path=self.folder),), host_base=False)

    async def save(self, folder: Path) -> Root:
        try:
            await asyncio.to_thread(shutil.copytree, self.folder, folder / "files", symlinks=True)
        except shutil.Error as error:  # it hides what the system said
            full = "[Errno 28]" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        return Root(layers=(Layer(path=folder / "files"),), host_base=False)

    async def release(self) -> None:
        assert self.folder not in self._released, "released twice"
        self._released.append(self.folder)
        shutil.rmtree(self.folder)


class FolderBox:
    def __init__(self, folder: Path, backend: FolderBackend, process: subprocess.Popen[bytes] | int | None) -> None:
        self.folder = folder
        self.files = folder / "files"
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.paused = False
        self._backend = backend
        self._process = process
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def handle(self) -> str:
        return self.folder.name

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process if isinstance(self._process, int) else self._process.pid

    async def call(self, call: Call) -> Outcome:
        await self._step("call")
        await self._awake.wait()
        self._require()
        place = self.files / call.arguments[0].removeprefix(HOME).lstrip("/")
        code, stdout = 0, b""
        try:
            if call.kind is CallKind.RUN:
                process = await asyncio.create_subprocess_exec(
                    *call.arguments, cwd=self.files, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
                )
                stdout, _ = await process.communicate()
                code = process.returncode or 0
            elif call.kind is CallKind.WRITE:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(call.stdin)
            elif call.kind is CallKind.READ:
                stdout = place.read_bytes()
            else:
                stdout = b"\0".join(os.fsencode(name) for name in os.listdir(place))
        except OSError as error:
            code = error.errno or errno.EIO
        return Outcome(code=code, stdout=stdout, stderr=b"", dropped_bytes=0, timed_out=False, started=True,
                       oom_killed=False, duration_s=0.0)

    async def pause(self, *, cold: bool = False) -> None:
        await self._step("pause")
        self._signal(signal.SIGSTOP)
        while self._process is not None and not self.gone.done() and not stopped(self.pid):
            await asyncio.sleep(0.001)  # it stops when it next runs
        self.paused = True
        self._awake.clear()

    async def resume(self) -> None:
        await self._step("resume")
        self._signal(signal.SIGCONT)
        self.paused = False
        self._awake.set()

    async def snapshot(self, *, live: bool = False) -> FolderFrozen:
        await self._step("snapshot")
        return self._backend.freeze(self.files, live=live)

    async def fork(self, specs: Sequence[SandboxSpec], *, timeout_s: float) -> list[FolderBox | Exception]:
        await self._step("fork")
        children: list[FolderBox | Exception] = []
        for number, spec in enumerate(specs):
            if f"child {number}" in self._backend.faults:
                children.append(SandboxError(f"child {number} fails"))
                continue
            child = await self._backend.create(spec, timeout_s=timeout_s)
            children.append(child)
            if self.gone.done():
                for each in children:
                    if isinstance(each, FolderBox):
                        await each.kill()
                raise SandboxGone("it is gone")
            shutil.copytree(self.files, child.files, dirs_exist_ok=True)
        return children

    async def usage(self) -> Usage:
        return Usage(processes=1)

    async def kill(self) -> None:
        if self.gone.done():
            return
        await asyncio.sleep(0)
        if self.gone.done():
            return
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            if isinstance(self._process, subprocess.Popen):
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._backend.boxes.pop(self.handle, None)
        self._awake.set()
        self.gone.set_result("killed")

    async def _step(self, verb: str) -> None:
        self._require()
        if verb in self._backend.slow:
            self._backend.waiting.set()
            await self._backend.go_on.wait()
        await asyncio.sleep(0)
        self._require()
        if verb in self._backend.faults:
            raise self._backend.faults[verb]

    def _require(self) -> None:
        if self.gone.done():
            raise SandboxGone("it is gone")

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class FolderBackend:
    name = "folder"
    isolation = Isolation.SHARED_KERNEL
    abilities = frozenset({Ability.PAUSE, Ability.COLD_PAUSE, Ability.SNAPSHOT, Ability.LIVE_FORK, Ability.USAGE})

    def __init__(self, folder: Path, *, processes: bool = True) -> None:
        self.folder = folder
        self.boxes: dict[str, FolderBox] = {}
        self.released: list[Path] = []
        self.faults: dict[str, Exception] = {}
        self.slow: set[str] = set()
        self.waiting, self.go_on = asyncio.Event(), asyncio.Event()
        self._processes = processes
        self._count = 0
        for each in ("boxes", "frozen"):
            (folder / each).mkdir(parents=True, exist_ok=True)

    @property
    def num_frozen(self) -> int:
        return len(list((self.folder / "frozen").iterdir()))

    def freeze(self, files: Path, *, live: bool) -> FolderFrozen:
        target = self.folder / "frozen" / self._name()
        shutil.copytree(files, target, symlinks=True)
        return FolderFrozen(target, self.released, live=live)

    async def create(self, spec: SandboxSpec, *, root: Root | None = None, timeout_s: float) -> FolderBox:
        if spec.template == "moon":
            raise SandboxUnavailable("there is no template 'moon'")
        if "create" in self.faults:
            raise self.faults["create"]
        folder = self.folder / "boxes" / self._name()
        (folder / "files").mkdir(parents=True)
        if "create" in self.slow:
            self.waiting.set()
            await self.go_on.wait()
        await asyncio.sleep(0)
        for layer in reversed(root.layers if root else ()):
            shutil.copytree(layer.path, folder / "files", dirs_exist_ok=True, symlinks=True)
        process = subprocess.Popen(["sleep", "600"], cwd=folder, start_new_session=True) if self._processes else None
        box = self.boxes[folder.name] = FolderBox(folder, self, process)
        return box

    async def restore(self, frozen: Path, spec: SandboxSpec, *, timeout_s: float) -> FolderBox:
        raise SandboxUnavailable("a folder has no processes to restore")

    async def adopt(self) -> dict[str, FolderBox]:
        shutil.rmtree(self.folder / "frozen")
        (self.folder / "frozen").mkdir()
        found: dict[str, FolderBox] = {}
        for folder in (self.folder / "boxes").iterdir():
            pid = processes_in(folder)
            if pid:
                found[folder.name] = self.boxes[folder.name] = FolderBox(folder, self, pid[0])
            else:
                shutil.rmtree(folder)
        return found

    async def leave(self) -> None:
        self.boxes.clear()

    async def close(self) -> None:
        for box in list(self.boxes.values()):
            await box.kill()

    def _name(self) -> str:
        self._count += 1
        return f"{os.getpid()}-{self._count}"


def processes_in(folder: Path) -> list[int]:
    """The living processes that work in a folder or below it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z" and Path(os.readlink(process / "cwd")).is_relative_to(folder):
                    found.append(int(process.name))
    return found


def stopped(pid: int) -> bool:
    """Stopped or dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TZ"
    except OSError:
        return True

