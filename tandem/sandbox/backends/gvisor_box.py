"""One gVisor box: calls by the same in-box agent as every box of ours, standing still, living copies, its end.

Owns: the order of its moves. Refuses: what gVisor of today has not: ports, policies. Invariants: a copy is taken only
when nothing is on its way between the box and us; its files and processes are of one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tandem.core.boxes import NetworkPolicy, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SnapshotError
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Call, Frozen, Layer, Outcome, Root, Start, Usage
from tandem.sandbox.backends.adoption import pack_root
from tandem.sandbox.backends.cgroups import Cgroups
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.gvisor_frozen import NOTE, GvisorFiles, GvisorFrozen
from tandem.sandbox.backends.gvisor_root import Copies
from tandem.sandbox.backends.process import NamespaceProcess
from tandem.sandbox.backends.runsc import Runsc
from tandem.sandbox.network.attempts import Tell
from tandem.sandbox.network.budget import Budget

KILL_TIMEOUT_S = 15.0
DELETED = re.compile(r'dentry\("([^"]*)"\)\.beforeSave: deleted')


class Surroundings(Protocol):
    """What a box needs of its backend."""

    @property
    def cgroups(self) -> Cgroups | None: ...

    @property
    def folder(self) -> Path: ...

    @property
    def copies(self) -> Copies: ...

    async def copy(self, images: Path, spec: SandboxSpec, parent: Channel | None, *, timeout_s: float) -> Box:
        """A box from a checkpoint."""
        ...


class GvisorBox:
    """``number`` names it to runsc and in its control groups."""

    handle = ""

    def __init__(self, number: int, runsc: Runsc, around: Surroundings, root: Root) -> None:
        self.number = number
        self.pid = 0
        self.upper = -1  # what it wrote, as a descriptor
        self.root = root
        self._runsc = runsc
        self._around = around
        self._paused = False
        self._moving = asyncio.Lock()
        self.channel: Channel | None = None
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        return f"box-{self.number}"

    async def call(self, call: Call) -> Outcome:
        try:
            return await self._alive().call(call)
        except SandboxTimeout:
            self.bury()
            raise

    async def start(self, start: Start) -> NamespaceProcess:
        try:
            return await self._alive().start(start)
        except SandboxTimeout:
            self.bury()
            raise

    async def pause(self, *, cold: bool = False) -> None:
        self._alive()
        if cold:
            raise refuse("gvisor", Ability.COLD_PAUSE)
        async with self._moving:
            await self._stand()

    async def resume(self) -> None:
        self._alive()
        async with self._moving:
            await self._go()

    async def snapshot(self, *, live: bool = False) -> Frozen:
        self._alive()
        if not live:
            return await self._files()
        images, root = await self._checkpoint()
        return GvisorFrozen(images, root, self._around.copies)

    async def fork(self, specs: Sequence[SandboxSpec], *, timeout_s: float) -> list[Box | Exception]:
        """One checkpoint, restored once for each; the copies share no memory."""
        images, root = await self._checkpoint()
        try:
            made = await asyncio.gather(
                *(self._around.copy(images, spec, self.channel, timeout_s=timeout_s) for spec in specs),
                return_exceptions=True,
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, images, True)
            await self._around.copies.drop(root.layers[:1])
        for each in made:
            if isinstance(each, BaseException) and not isinstance(each, Exception):
                raise each
        return [each for each in made if not isinstance(each, BaseException) or isinstance(each, Exception)]

    async def set_network(self, policy: NetworkPolicy, tell: Tell, budget: Budget | None = None) -> None:
        self._alive()
        if not policy.none:
            raise refuse("gvisor", Ability.NETWORK)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raise refuse("gvisor", Ability.PORTS)

    async def usage(self) -> Usage:
        """With gVisor's own processes. What no control group tells is None."""
        self._alive()
        groups = self._around.cgroups
        if groups is None:
            raise refuse("gvisor", Ability.USAGE)
        told = os.statvfs(f"/proc/self/fd/{self.upper}")
        used, total = (told.f_blocks - told.f_bfree) * told.f_frsize, told.f_blocks * told.f_frsize
        return Usage(
            cpu_s=groups.cpu_s(self.number),
            memory_bytes=groups.number(self.number, "memory", unified="memory.current", legacy="memory.usage_in_bytes"),
            memory_peak_bytes=groups.number(
                self.number, "memory", unified="memory.peak", legacy="memory.max_usage_in_bytes"
            ),
            disk_bytes=used, disk_total_bytes=total,
        )  # fmt: skip

    def bury(self) -> None:
        """Begin its end: the sandbox process dies at once, its helpers with it."""
        if self.pid and not self.gone.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def kill(self) -> None:
        """Returns when no process of the box runs; its folders and groups go a moment later, ``close`` waits for
        them."""
        if self.gone.done():
            return
        self.bury()
        try:
            await asyncio.wait_for(asyncio.shield(self.gone), KILL_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxTimeout(f"it is not gone {KILL_TIMEOUT_S:g} s after its kill") from error

    async def _files(self) -> GvisorFiles:
        async with self._moving:
            async with self._still():
                layer = await self._copy()
            root = replace(self.root, layers=(layer, *self.root.layers))
            self._around.copies.hold(self.root.layers)
            return GvisorFiles(root, self._around.copies)

    async def _checkpoint(self) -> tuple[Path, Root]:
        """Processes and files of one moment: the folder of the first, and the root of the second."""
        self._alive()
        async with self._moving:
            was_paused = self._paused
            await self._go()  # its agent must hear of it
            images = Path(tempfile.mkdtemp(prefix="images-", dir=self._around.folder))
            layers: list[Layer] = []
            try:
                channel = self._alive()
                async with channel.quiet(), self._still():
                    await self._save(images)
                    layers.append(await self._copy())
                root = replace(self.root, layers=(*layers, *self.root.layers))
                (images / NOTE).write_text(json.dumps({"next": channel.next_number, "root": pack_root(root)}))
                if was_paused:
                    await self._stand()
            except BaseException:
                shutil.rmtree(images, ignore_errors=True)
                await self._around.copies.drop(layers)
                raise
            return images, root

    async def _save(self, images: Path) -> None:
        try:
            await self._tell("checkpoint", f"--image-path={images}", "--leave-running", "--compression=none")
        except SandboxError as error:
            if (found := DELETED.search(error.message)) is None:
                raise
            raise SnapshotError(
                f"a process of the box holds /{found[1]}, which was deleted: gVisor keeps no such file",
                hint="close it, or take a snapshot of the files",
            ) from error

    async def _copy(self) -> Layer:
        """What it wrote. It stands still."""
        target = self._around.folder / f"files-{os.urandom(6).hex()}"
        try:
            return await self._around.copies.make(self.upper, target)
        except OSError as error:
            self._alive()
            raise SnapshotError(f"its files could not be copied: {error}", hint="is there memory for them?") from error

    @contextlib.asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """It stands, and goes on as it was."""
        was_paused = self._paused
        await self._stand()
        try:
            yield
        finally:
            if not was_paused and not self.gone.done():
                await self._go()

    async def _stand(self) -> None:
        channel = self._alive()
        if not self._paused:
            await self._tell("pause")
            self._paused = True
            channel.pause()

    async def _go(self) -> None:
        if self._paused:
            self._alive().resume()
            self._paused = False
            await self._tell("resume")

    async def _tell(self, verb: str, *options: str) -> None:
        try:
            await self._runsc.run(self._around.folder, [verb, *options, self.name])
        except SandboxError as error:
            self._alive()
            raise error

    def _alive(self) -> Channel:
        if self.channel is None or self.gone.done():
            raise SandboxGone("it is gone", hint="create a new one")
        return self.channel
