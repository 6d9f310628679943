"""The least backend that a build needs: overlay mounts and chroot, no isolation. For tests of builds alone, as root."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.abilities import Ability
from tandem.sandbox.backend import Layer, LayerKind, Outcome, Piece, Root, Start
from tandem.sandbox.images.view import open_layer


class ChrootProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def output(self, *, from_start: bool = False) -> AsyncIterator[Piece]:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1000):
            yield Piece("stdout", data)

    async def wait(self) -> Outcome:
        code = await self._process.wait()
        return Outcome(code=code, stdout=b"", stderr=b"", dropped_bytes=0, timed_out=False, started=True,
                       oom_killed=False, duration_s=0.0)


class ChrootFrozen:
    def __init__(self, box: ChrootBox) -> None:
        self._box = box

    async def save(self, folder: Path) -> Root:
        kept = folder / "upper"
        await (await asyncio.create_subprocess_exec("cp", "-a", self._box.upper, kept)).wait()
        root = self._box.root
        return Root(layers=(Layer(kind=LayerKind.FOLDER, path=kept), *root.layers), host_base=False)

    async def release(self) -> None:
        pass


class ChrootBox:
    def __init__(self, root: Root) -> None:
        self.root = root
        self._folder = Path(tempfile.mkdtemp(prefix="chroot-box-"))
        self.upper = self._folder / "upper"
        for name in ("upper", "work", "merged"):
            (self._folder / name).mkdir()
        self._layers = [open_layer(layer) for layer in root.layers]

    async def start(self, start: Start) -> ChrootProcess:
        if not self.root.layers:
            raise FileNotFoundError(start.arguments[0])
        lower = ":".join(f"/proc/self/fd/{place}" for place in self._layers)
        options = f"lowerdir={lower},upperdir={self.upper},workdir={self._folder}/work"
        merged = self._folder / "merged"
        script = (
            f"mount -t overlay overlay -o {shlex.quote(options)} {merged} && "
            f"exec chroot {merged} /bin/sh -c 'cd \"$0\" && exec \"$@\"' {shlex.join([start.folder, *start.arguments])}"
        )
        return ChrootProcess(await asyncio.create_subprocess_exec(
            "unshare", "-m", "/bin/sh", "-c", script, env={**start.environment}, pass_fds=self._layers,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        ))

    async def snapshot(self, *, live: bool = False) -> ChrootFrozen:
        return ChrootFrozen(self)

    async def kill(self) -> None:
        while self._layers:
            os.close(self._layers.pop())
        shutil.rmtree(self._folder)


class ChrootBackend:
    """``boxes`` are all that were made."""

    name = "chroot"
    abilities = frozenset((Ability.IMAGES, Ability.PROCESSES, Ability.SNAPSHOT))

    def __init__(self) -> None:
        self.boxes: list[ChrootBox] = []

    async def create(self, spec: SandboxSpec, *, root: Root | None = None, timeout_s: float) -> ChrootBox:
        assert root is not None
        self.boxes.append(ChrootBox(root))
        return self.boxes[-1]
