"""The gVisor backend: boxes on a kernel in user space, with checkpoints of the living box.

Owns: the folder with all that its boxes need, their control groups, and the end of both. Refuses: to run without
``runsc``, or not as root. A box dies with this process: its agent ends when its socket closes; what a killed process
left in folders and groups is swept by the next. The number of processes in a box is bounded by its memory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import Isolation, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable, SnapshotMissing
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Root
from tandem.sandbox.backends.adoption import unpack_root
from tandem.sandbox.backends.build import program
from tandem.sandbox.backends.cgroups import Cgroups, sweep
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.gvisor_box import GvisorBox
from tandem.sandbox.backends.gvisor_bundle import write_config
from tandem.sandbox.backends.gvisor_frozen import NOTE
from tandem.sandbox.backends.gvisor_root import Copies, Ground
from tandem.sandbox.backends.runsc import Runsc
from tandem.sandbox.backends.template import Template, host_template, image_template

PREFIX = "tandem-gvisor-"
KERNEL_BYTES = 128 * 2**20  # what gVisor's own kernel needs beside the box
MEMORY = Path("/dev/shm")  # checkpoints are quickest in memory
REAP_S = 10.0
AGENT = "agent"


class GvisorBackend:
    """``runsc`` None: the one on the PATH, looked for at the first box."""

    name = "gvisor"
    isolation = Isolation.USER_KERNEL
    abilities = frozenset({
        Ability.PAUSE, Ability.LIVE_SNAPSHOT, Ability.LIVE_FORK, Ability.PROCESSES, Ability.TERMINAL, Ability.USAGE,
        Ability.FILE_STREAMS, Ability.SNAPSHOT, Ability.IMAGES,
    })  # fmt: skip

    def __init__(self, *, cache: Path | None = None) -> None:
        self._cache = cache
        self._runsc: Runsc | None = None
        self._folder: Path | None = None
        self._templates: dict[bool, Template] = {}  # by whether the host is below
        self._copies = Copies()
        self._cgroups: Cgroups | None = None
        self._starting = asyncio.Lock()
        self._boxes: dict[int, GvisorBox] = {}
        self._reaping: set[asyncio.Task[None]] = set()
        self._next = 1

    @property
    def cgroups(self) -> Cgroups | None:
        return self._cgroups

    @property
    def copies(self) -> Copies:
        return self._copies

    @property
    def folder(self) -> Path:
        """Raises SandboxGone: the backend is closed."""
        if self._folder is None:
            raise SandboxGone("the backend is closed", hint="create a new one")
        return self._folder

    async def create(self, spec: SandboxSpec, *, root: Root | None = None, timeout_s: float) -> Box:
        if not spec.network.none:
            raise refuse(self.name, Ability.NETWORK)
        if spec.template != "host" and root is None:
            raise SandboxUnavailable(f"the gvisor backend has no template {spec.template!r}", hint="known: host")
        return await self._make(spec, ["run"], root or Root(), None, timeout_s=timeout_s)

    async def restore(self, frozen: Path, spec: SandboxSpec, *, timeout_s: float) -> Box:
        return await self.copy(frozen, spec, None, timeout_s=timeout_s)

    async def copy(self, images: Path, spec: SandboxSpec, parent: Channel | None, *, timeout_s: float) -> Box:
        """A box from a checkpoint; it knows the long-lived commands of ``parent``."""
        note = json.loads((images / NOTE).read_text())
        root = unpack_root(note["root"])
        root = replace(root, layers=tuple(replace(each, path=images / each.path) for each in root.layers))
        if gone := [each.path for each in root.layers if not each.path.exists()]:
            raise SnapshotMissing(f"layer {gone[0]} of the snapshot is gone", hint="pull or build its image again")
        words = ["restore", f"--image-path={images}"]
        return await self._make(spec, words, root, parent, first=note["next"], timeout_s=timeout_s)

    async def adopt(self) -> dict[str, Box]:
        return {}

    async def leave(self) -> None:
        await self.close()

    async def close(self) -> None:
        async with self._starting:
            await asyncio.gather(*(box.kill() for box in list(self._boxes.values())), return_exceptions=True)
            while self._reaping:
                await asyncio.gather(*self._reaping, return_exceptions=True)
            if self._cgroups is not None:
                await asyncio.to_thread(self._cgroups.close)
            if self._folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._folder, True)
            self._folder = self._cgroups = None

    async def _ready(self) -> tuple[Runsc, Path]:
        async with self._starting:
            if self._runsc is None or not self._templates:
                self._runsc = await asyncio.to_thread(Runsc.find)
                self._templates = {True: await asyncio.to_thread(host_template), False: image_template()}
            if self._folder is None:
                await asyncio.to_thread(_sweep)
                made = await asyncio.to_thread(program, self._cache)
                place = MEMORY if os.access(MEMORY, os.W_OK) else None
                self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place))
                self._folder.chmod(0o711)
                for name in ("root", "hidden"):
                    (self._folder / name).mkdir(mode=0o700)
                shutil.copyfile(made, self._folder / AGENT)
                (self._folder / AGENT).chmod(0o755)
                self._cgroups = await asyncio.to_thread(Cgroups.open)
            return self._runsc, self._folder

    async def _make(
        self, spec: SandboxSpec, words: list[str], root: Root, parent: Channel | None, *, first: int = 1,
        timeout_s: float,
    ) -> Box:
        runsc, folder = await self._ready()
        template = self._templates[root.host_base]
        number = self._next
        self._next += 1
        verb, *options = words
        ground = Ground(folder, folder / AGENT, template, root, spec, fresh=verb == "run")
        box = GvisorBox(number, runsc, self, root)
        bundle, pid_file = folder / box.name, folder / f"{box.name}.pid"
        ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        box.channel = Channel(
            {**template.environment, **root.environment, **spec.environment}, _settler(ready), box.bury, first=first
        )
        if parent is not None:
            box.channel.inherit(parent)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._boxes[number] = box
        self._copies.hold(root.layers)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(write_config, bundle, ground.place, template, spec, folder / AGENT)
                groups = await asyncio.to_thread(self._groups, number, spec)
                await runsc.run(
                    folder, [verb, *options, "--detach", f"--bundle={bundle}", f"--pid-file={pid_file}", box.name],
                    stdin=theirs.fileno(), groups=groups, before=ground.words, descriptors=[ground.descriptor],
                    timeout_s=timeout_s,
                )  # fmt: skip
                theirs.close()
                box.upper = ground.upper()
                box.pid = int(pid_file.read_text())
                self._watch(box)
                box.channel.attach(ours)
                if verb == "restore":
                    box.channel.wake()  # it waits for its first word
                elif (problem := await ready) is not None:
                    raise SandboxError(f"no box: {problem}")
        except BaseException as error:
            theirs.close()
            if box.pid:
                await asyncio.shield(box.kill())
            else:
                ours.close()
                self._end(box, "it was never there")
            if isinstance(error, TimeoutError):
                raise SandboxTimeout(f"a box did not answer {timeout_s:g} s after its creation") from error
            raise
        finally:
            ground.close()
        return box

    def _groups(self, number: int, spec: SandboxSpec) -> list[Path]:
        """The box's control groups, made. Its processes are gVisor's threads outside: no limit counts them."""
        assert self._cgroups is not None
        limits = replace(spec.limits, memory_bytes=spec.limits.memory_bytes + spec.limits.disk_bytes + KERNEL_BYTES)
        made = []
        for name, _, values in self._cgroups.box_folders(number, limits):
            folder = Path(name)
            folder.mkdir()
            for file, value in values:
                if file != "pids.max":
                    (folder / file).write_text(value)
            made.append(folder)
        return made

    def _watch(self, box: GvisorBox) -> None:
        """Hear of the end of the sandbox process."""
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(box.pid)
        except ProcessLookupError:
            loop.call_soon(self._end, box, "it ended as it began")
            return

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._end(box, "its kernel ended")

        loop.add_reader(descriptor, ended)

    def _end(self, box: GvisorBox, how: str) -> None:
        self._boxes.pop(box.number, None)
        if box.channel is not None:
            box.channel.end(how)
        if not box.gone.done():
            box.gone.set_result(how)
        task = asyncio.get_running_loop().create_task(self._reap(box))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def _reap(self, box: GvisorBox) -> None:
        """What the kernel and runsc still hold of it."""
        if box.upper >= 0:
            os.close(box.upper)
            box.upper = -1
        if self._runsc is None or self._folder is None:
            return
        with contextlib.suppress(SandboxError):
            await self._runsc.run(self._folder, ["delete", "--force", box.name])
        await asyncio.to_thread(shutil.rmtree, self._folder / box.name, True)
        (self._folder / f"{box.name}.pid").unlink(missing_ok=True)
        await self._copies.drop(box.root.layers)
        groups = [] if self._cgroups is None else [folder for _, folder in self._cgroups.folders_of(box.number)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                while groups := [folder for folder in groups if not _removed(folder)]:
                    await asyncio.sleep(0.1)


def make(section: SandboxSection, state: Path | None) -> GvisorBackend:
    """The backend as a recipe names it."""
    return GvisorBackend()


def _settler(ready: asyncio.Future[str | None]) -> Callable[[str | None], None]:
    def settle(problem: str | None) -> None:
        if not ready.done():
            ready.set_result(problem)

    return settle


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _sweep() -> None:
    """What dead processes of this user left: their groups with all that still runs in them, and their folders."""
    sweep()
    for base in {MEMORY, Path(tempfile.gettempdir())}:
        for folder in base.glob(f"{PREFIX}*"):
            owner = folder.name.removeprefix(PREFIX).split("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)
