"""The namespace backend: boxes made of Linux namespaces, cgroups and a seccomp filter.

Owns: how a spec becomes a create message; which ids a box maps to; what replaces cgroups where there are none.
Refuses: to run anything without isolation; a step that fails fails the box. The kernel is shared with the host:
this holds buggy and careless code, and raises the cost for hostile code; it is no virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable
from tandem.sandbox.backend import Ability, Call, Isolation, Outcome
from tandem.sandbox.backends.build import program
from tandem.sandbox.backends.cgroups import SPARE_PIDS, Cgroups, sweep
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.frames import create_message, pack_steps
from tandem.sandbox.backends.keeper import Keeper
from tandem.sandbox.backends.template import WORK_ID, Template, host_template

IDS_A_BOX = 65536
FIRST_ID = 0x10000000
NUM_RANGES = 4096
KILL_TIMEOUT_S = 15.0


class NamespaceBox:
    """One live box."""

    def __init__(self, number: int, backend: NamespaceBackend) -> None:
        self._number = number
        self._backend = backend
        self.channel: Channel | None = None
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def handle(self) -> str:
        return ""

    async def call(self, call: Call) -> Outcome:
        if self.channel is None or self.gone.done():
            raise SandboxGone("it is gone", hint="create a new one")
        oom_before = self._backend.oom_kills(self._number)
        try:
            outcome = await self.channel.call(call)
        except SandboxTimeout:
            self._backend.bury(self._number)
            raise
        if outcome.oom_killed or self._backend.oom_kills(self._number) == oom_before:
            return outcome
        return replace(outcome, oom_killed=True)

    async def kill(self) -> None:
        if not self.gone.done():
            self._backend.bury(self._number)
            try:
                await asyncio.wait_for(asyncio.shield(self.gone), KILL_TIMEOUT_S)
            except TimeoutError as error:
                raise SandboxTimeout(f"it is not gone {KILL_TIMEOUT_S:g} s after its kill") from error


class NamespaceBackend:
    """Makes boxes through one keeper process; starts it at first use and again should it die."""

    name = "namespace"
    isolation = Isolation.SHARED_KERNEL
    abilities: frozenset[Ability] = frozenset()

    def __init__(self, *, cache: Path | None = None) -> None:
        self._cache = cache
        self._keeper: Keeper | None = None
        self._cgroups: Cgroups | None = None
        self._templates: dict[str, tuple[Template, bytes]] = {}
        self._starting = asyncio.Lock()
        self._boxes: dict[int, NamespaceBox] = {}
        self._next = 1

    @property
    def cgroups(self) -> Cgroups | None:
        """The groups in use; None before the first box."""
        return self._cgroups

    async def create(self, spec: SandboxSpec, *, timeout_s: float) -> NamespaceBox:
        keeper = await self._ready()
        assert self._cgroups is not None
        template, steps = self._template(spec.template)
        number = self._next
        self._next += 1
        box = NamespaceBox(number, self)
        ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def settle(problem: str | None) -> None:
            if not ready.done():
                ready.set_result(problem)

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        channel = Channel({**template.environment, **spec.environment}, settle, lambda: self.bury(number))
        try:
            message = self._message(number, spec, steps)
            gone = keeper.create(number, message, theirs, settle)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        box.channel = channel
        self._boxes[number] = box
        gone.add_done_callback(lambda ended: self._on_gone(number, box, settle, ended.result()))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
                problem = await ready
        except TimeoutError as error:
            await box.kill()
            raise SandboxTimeout(f"a box did not answer {timeout_s:g} s after its creation") from error
        except BaseException:
            self.bury(number)
            raise
        if problem is not None:
            await box.kill()
            raise SandboxError(f"no box: {problem}", hint="`tandem doctor` shows what this machine can do")
        return box

    async def adopt(self) -> dict[str, NamespaceBox]:
        return {}

    async def leave(self) -> None:
        await self.close()

    async def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()
        if self._cgroups is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._cgroups.close)
            self._cgroups = None

    def bury(self, number: int) -> None:
        if self._keeper is not None:
            self._keeper.kill(number)

    def oom_kills(self, number: int) -> int:
        return 0 if self._cgroups is None else self._cgroups.oom_kills(number)

    def python(self) -> str:
        """Where the host template's python3 comes from."""
        return self._template("host")[0].python

    async def _ready(self) -> Keeper:
        async with self._starting:
            if self._keeper is not None and self._keeper.alive:
                return self._keeper
            loop = asyncio.get_running_loop()
            if self._keeper is not None:
                await self.close()
            image = await loop.run_in_executor(None, program, self._cache)
            await loop.run_in_executor(None, sweep)
            cgroups: Cgroups = await loop.run_in_executor(None, Cgroups.open)
            self._cgroups = cgroups
            keeper = self._keeper = Keeper.start(image, [str(group.folder) for group in cgroups.groups])
            return keeper

    def _template(self, name: str) -> tuple[Template, bytes]:
        """A template and its steps as the program reads them."""
        if name != "host":
            raise SandboxUnavailable(f"the namespace backend has no template {name!r}", hint="known: host")
        if name not in self._templates:
            template = host_template()
            self._templates[name] = (template, pack_steps(template.steps))
        return self._templates[name]

    def _message(self, number: int, spec: SandboxSpec, steps: bytes) -> bytes:
        assert self._cgroups is not None
        limits = spec.limits
        ranged = may_map_ranges()
        first = FIRST_ID + number % NUM_RANGES * IDS_A_BOX
        has_memory = "memory" in self._cgroups.controllers
        return create_message(
            number,
            hostname=spec.hostname,
            outer_ids=(first, first, IDS_A_BOX) if ranged else (os.geteuid(), os.getegid(), 1),
            work_id=WORK_ID,
            disk=(limits.disk_bytes, _inodes(limits)),
            # With one id for all, the agent's own processes count too.
            num_processes=limits.pids if ranged else limits.pids + SPARE_PIDS,
            data_bytes=0 if has_memory else limits.memory_bytes,
            watch_bytes=0 if has_memory else limits.memory_bytes,
            cgroups=self._cgroups.box_folders(number, limits),
            steps=steps,
        )

    def _on_gone(self, number: int, box: NamespaceBox, settle: Callable[[str], None], how: str) -> None:
        self._boxes.pop(number, None)
        settle(how)
        if box.channel is not None:
            box.channel.end(how)
        with contextlib.suppress(asyncio.InvalidStateError):
            box.gone.set_result(how)


def _inodes(limits: SandboxLimits) -> int:
    return min(max(limits.disk_bytes // 4096, 1024), 1 << 18)


def may_map_ranges() -> bool:
    """Whether this process may give each box its own range of ids: root, with the ranges mapped to itself."""
    if os.geteuid() != 0:
        return False
    last = FIRST_ID + NUM_RANGES * IDS_A_BOX
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inner, _, count = (int(field) for field in line.split())
        if inner <= FIRST_ID and last <= inner + count:
            return True
    return False
