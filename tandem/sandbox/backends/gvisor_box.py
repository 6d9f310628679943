"""One gVisor box: calls by the same in-box agent as every box of ours, standing still, living copies, its end.

Owns: the order of its moves. Refuses: what gVisor of today has not: files without processes as a snapshot, ports,
policies. Invariant: a copy is taken only when nothing is on its way between the box and us.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tandem.core.boxes import NetworkPolicy, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SnapshotError
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Call, Outcome, Root, Start, Usage
from tandem.sandbox.backends.cgroups import Cgroups
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.process import NamespaceProcess
from tandem.sandbox.backends.runsc import Runsc
from tandem.sandbox.network.attempts import Tell

KILL_TIMEOUT_S = 15.0
NOTE = "tandem.json"  # beside the images: the number of the next call


class Surroundings(Protocol):
    """What a box needs of its backend."""

    @property
    def cgroups(self) -> Cgroups | None: ...

    @property
    def folder(self) -> Path: ...

    async def copy(self, images: Path, spec: SandboxSpec, parent: Channel | None, *, timeout_s: float) -> Box:
        """A box from a checkpoint."""
        ...


class GvisorFrozen:
    """A checkpoint: files and processes. ``folder`` is ours until ``release``."""

    live = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._released = False

    @property
    def root(self) -> Root:
        """Raises SnapshotError: its files are not apart from its processes."""
        raise SnapshotError("a live snapshot has no files apart from its processes", hint="restore it, durable")

    async def save(self, folder: Path) -> Root:
        if self._released:
            raise SnapshotError("the snapshot was released before it was saved")
        await asyncio.to_thread(shutil.copytree, self._folder, folder, dirs_exist_ok=True)
        await asyncio.to_thread(os.sync)
        return Root()

    async def release(self) -> None:
        if not self._released:
            self._released = True
            await asyncio.to_thread(shutil.rmtree, self._folder, True)


class GvisorBox:
    """``number`` names it to runsc and in its control groups."""

    handle = ""

    def __init__(self, number: int, runsc: Runsc, around: Surroundings) -> None:
        self.number = number
        self.pid = 0
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
            channel = self._alive()
            if not self._paused:
                await self._tell("pause")
                self._paused = True
                channel.pause()

    async def resume(self) -> None:
        self._alive()
        async with self._moving:
            await self._go()

    async def snapshot(self, *, live: bool = False) -> GvisorFrozen:
        self._alive()
        if not live:
            raise refuse("gvisor", Ability.SNAPSHOT)
        return GvisorFrozen(await self._checkpoint())

    async def fork(self, specs: Sequence[SandboxSpec], *, timeout_s: float) -> list[Box | Exception]:
        """One checkpoint, restored once for each; the copies share no memory."""
        images = await self._checkpoint()
        try:
            made = await asyncio.gather(
                *(self._around.copy(images, spec, self.channel, timeout_s=timeout_s) for spec in specs),
                return_exceptions=True,
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, images, True)
        for each in made:
            if isinstance(each, BaseException) and not isinstance(each, Exception):
                raise each
        return [each for each in made if not isinstance(each, BaseException) or isinstance(each, Exception)]

    async def set_network(self, policy: NetworkPolicy, tell: Tell) -> None:
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
        return Usage(
            cpu_s=groups.cpu_s(self.number),
            memory_bytes=groups.number(self.number, "memory", unified="memory.current", legacy="memory.usage_in_bytes"),
            memory_peak_bytes=groups.number(
                self.number, "memory", unified="memory.peak", legacy="memory.max_usage_in_bytes"
            ),
        )  # fmt: skip

    def bury(self) -> None:
        """Begin its end: the sandbox process dies at once, the kernel takes its helpers away within two seconds."""
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

    async def _checkpoint(self) -> Path:
        self._alive()
        async with self._moving:
            was_paused = self._paused
            await self._go()
            images = Path(tempfile.mkdtemp(prefix="images-", dir=self._around.folder))
            try:
                channel = self._alive()
                async with channel.quiet():
                    await self._tell("checkpoint", f"--image-path={images}", "--leave-running", "--compression=none")
                (images / NOTE).write_text(json.dumps({"next": channel.next_number}))
                if was_paused:
                    await self._tell("pause")
                    self._paused = True
                    channel.pause()
            except BaseException:
                shutil.rmtree(images, ignore_errors=True)
                raise
            return images

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
