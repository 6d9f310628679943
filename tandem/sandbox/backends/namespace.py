"""The namespace backend: boxes made of Linux namespaces, cgroups and a seccomp filter.

Owns: how a spec becomes a create message; which ids a box maps to; what replaces cgroups where there are none.
Refuses: to run anything without isolation; a step that fails fails the box. The kernel is shared with the host:
this holds buggy and careless code, and raises the cost for hostile code; it is no virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import Isolation, SandboxLimits, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SandboxUnavailable
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Root
from tandem.sandbox.backends.adoption import GROUPS, SOCKET, keeper_at, listen, pack_root, unpack_root
from tandem.sandbox.backends.build import program
from tandem.sandbox.backends.cgroups import SPARE_PIDS, Cgroups, sweep
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.frames import create_message, milliseconds, pack_steps
from tandem.sandbox.backends.keeper import Keeper
from tandem.sandbox.backends.live_fork import live_fork_works
from tandem.sandbox.backends.mounts import MountChoice, Mounts, read_found
from tandem.sandbox.backends.namespace_box import NamespaceBox
from tandem.sandbox.backends.paging import has_swap
from tandem.sandbox.backends.process import NamespaceProcess
from tandem.sandbox.backends.template import WORK_ID, Template, host_template, image_template
from tandem.sandbox.network.names import Names

IDS_A_BOX = 65536
FIRST_ID = 0x10000000
NUM_RANGES = 4096
RANGES_APART = 1237  # odd, so that keepers with numbers in a row begin far from each other
GRACE_S = 600
LAST_CALL = 0xFFFFFFFF
START_TIMEOUT_S = 10.0  # of the keeper, with its look at what the kernel mounts


@dataclass(frozen=True, slots=True)
class Plan:
    """One box to be: ``steps`` of its template as the program reads them; ``first_id`` of its range on the host."""

    number: int
    spec: SandboxSpec
    root: Root
    environment: dict[str, str]
    steps: bytes
    first_id: int


class NamespaceBackend:
    """Makes boxes through one keeper process; starts it at first use and again should it die. With a ``state_folder``
    the keeper and its boxes outlive this process by ``grace_s`` and wait there to be adopted."""

    name = "namespace"
    isolation = Isolation.SHARED_KERNEL

    def __init__(
        self, *, cache: Path | None = None, state_folder: Path | None = None, grace_s: int = GRACE_S,
        mounts: MountChoice | None = None, names: Names | None = None,
    ) -> None:
        """``mounts`` None: the best way of this kernel. ``names`` looks names up for boxes; None: the system's
        resolver."""
        self.names = names or Names()
        self._cache = cache
        self._state_folder = state_folder
        self._grace_s = grace_s
        self._choice = mounts or MountChoice()
        self._mounts: Mounts | None = None
        self._keeper: Keeper | None = None
        self._cgroups: Cgroups | None = None
        self._templates: dict[str, tuple[Template, bytes]] = {}
        self._starting = asyncio.Lock()
        self._boxes: dict[int, NamespaceBox] = {}
        self._next = 1

    @property
    def abilities(self) -> frozenset[Ability]:
        found = {
            Ability.PAUSE, Ability.PROCESSES, Ability.TERMINAL, Ability.PORTS, Ability.SNAPSHOT, Ability.IMAGES,
            Ability.USAGE, Ability.NETWORK, Ability.FILE_STREAMS,
        }
        if has_swap():
            found.add(Ability.COLD_PAUSE)
        # Without such a group the processes of copies would count as their parent's.
        counted = self._cgroups is None or "pids" in self._cgroups.controllers
        if counted and live_fork_works() and may_map_ranges():
            found.add(Ability.LIVE_FORK)
        return frozenset(found)

    @property
    def cgroups(self) -> Cgroups | None:
        """The groups in use; None before the first box."""
        return self._cgroups

    @property
    def mounts(self) -> Mounts | None:
        """How roots are made here; None before the first box."""
        return self._mounts

    @property
    def keeper(self) -> Keeper:
        if self._keeper is None:
            raise SandboxGone("the backend is closed", hint="create a new one")
        return self._keeper

    async def create(self, spec: SandboxSpec, *, root: Root | None = None, timeout_s: float) -> Box:
        keeper = await self._ready()
        template, steps = self._template(spec.template if root is None else "host" if root.host_base else "image")
        root = Root() if root is None else root
        number = self._next
        self._next += 1
        environment = {**template.environment, **root.environment, **spec.environment}
        # Servers on one machine begin apart: the kernel counts some things (inotify's instances) by user, over all.
        first = FIRST_ID + (keeper.pid * RANGES_APART + number) % NUM_RANGES * IDS_A_BOX
        return await self._make(Plan(number, spec, root, environment, steps, first), keeper, timeout_s)

    async def branch(
        self, mother: NamespaceBox, spec: SandboxSpec, root: Root, process: NamespaceProcess, *, timeout_s: float
    ) -> NamespaceBox:
        """A box with a copy of a still box's one process. Raises as ``create``."""
        template, steps = self._template("host" if root.host_base else "image")
        number = self._next
        self._next += 1
        environment = {**template.environment, **root.environment, **spec.environment}
        plan = Plan(number, spec, root, environment, steps, mother.first_id)
        return await self._make(plan, self.keeper, timeout_s, mother=mother, process=process)

    async def _make(
        self, plan: Plan, keeper: Keeper, timeout_s: float, *, mother: NamespaceBox | None = None,
        process: NamespaceProcess | None = None,
    ) -> NamespaceBox:
        number = plan.number
        words = {"environment": plan.environment, "root": pack_root(plan.root), "first_id": plan.first_id}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            message = self._message(plan, json.dumps(words) if self._state_folder else "")
            copy = os.dup(ours.fileno()) if self._state_folder else -1
        except BaseException:
            ours.close()
            theirs.close()
            raise
        ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        settle = _settler(ready)
        box = self._enter(plan, settle)
        branch_of = None
        if mother is not None and process is not None:
            branch_of = (mother.number, box.carry(process), _limit_ms(process.start.timeout_s))
        try:
            gone = keeper.create(number, message, theirs, copy, settle, branch_of=branch_of)
        except BaseException:
            self._boxes.pop(number, None)
            ours.close()
            raise
        gone.add_done_callback(lambda ended: self._on_gone(number, box, settle, ended.result()))
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect(box, ours)
                problem = await ready
                await keeper.born(number)
                if problem is None and box.carried is not None:
                    await asyncio.shield(box.carried.started)
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

    async def restore(self, frozen: Path, spec: SandboxSpec, *, timeout_s: float) -> Box:
        raise refuse(self.name, Ability.LIVE_SNAPSHOT)

    async def adopt(self) -> dict[str, Box]:
        """Raises SandboxUnavailable: the earlier process still lives, or its boxes are of another version."""
        if self._state_folder is None or self._keeper is not None:
            return {}
        async with self._starting:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(None, keeper_at, self._state_folder)
            if found is None:
                return {}
            control, pid, mounts, pids, left = found
            self._mounts = read_found(mounts)
            self._keeper = Keeper(None, control, pid)
            self._keeper.pids.update(pids)
            self._cgroups = Cgroups.load(json.loads((self._state_folder / GROUPS).read_text()))
        boxes: dict[str, Box] = {}
        for number, text, end in left:
            words = json.loads(text)
            root = unpack_root(words["root"])
            plan = Plan(number, SandboxSpec(), root, words["environment"], b"", words["first_id"])
            box = self._enter(plan, _nobody, first=secrets.randbelow(LAST_CALL) + 1)
            gone = self._keeper.follow(number)
            gone.add_done_callback(partial(self._on_adopted_gone, number, box))
            end.setblocking(False)
            await self._connect(box, end)
            box.find_still()
            boxes[box.handle] = box
            self._next = max(self._next, number + 1)
        return boxes

    async def leave(self) -> None:
        if self._state_folder is None:
            await self.close()
        elif self._keeper is not None:
            self.names.close()
            self._keeper.leave()
            self._keeper = self._cgroups = None

    async def close(self) -> None:
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        self.names.close()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()
            if self._state_folder is not None:
                (self._state_folder / SOCKET).unlink(missing_ok=True)
        if self._cgroups is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._cgroups.close)
            self._cgroups = None

    def _enter(self, plan: Plan, settle: Callable[[str | None], None], *, first: int = 1) -> NamespaceBox:
        number = plan.number
        box = NamespaceBox(
            number, self, root=plan.root, handle=str(number) if self._state_folder else "", first_id=plan.first_id
        )
        box.channel = Channel(plan.environment, settle, lambda: self.bury(number), first=first)
        self._boxes[number] = box
        return box

    async def _connect(self, box: NamespaceBox, end: socket.socket) -> None:
        channel = box.channel
        assert channel is not None
        channel.attach(end)

    def bury(self, number: int) -> None:
        if self._keeper is not None:
            self._keeper.kill(number)

    def python(self) -> str:
        """Where the host template's python3 comes from."""
        return self._template("host")[0].python

    async def _ready(self) -> Keeper:
        async with self._starting:
            if self._keeper is not None and self._keeper.alive:
                return self._keeper
            loop = asyncio.get_running_loop()
            if self._keeper is not None:
                await self._end()
            image = await loop.run_in_executor(None, program, self._cache)
            await loop.run_in_executor(None, sweep)
            listener = None if self._state_folder is None else listen(self._state_folder)
            try:
                keeper = Keeper.start(
                    image, one_id=not may_map_ranges(), listener=-1 if listener is None else listener.fileno(),
                    grace_s=self._grace_s, ways=self._choice.packed(),
                )
            finally:
                if listener is not None:
                    listener.close()
            self._mounts = await _mounts_of(keeper)
            owner = os.getpid() if self._state_folder is None else keeper.pid
            cgroups: Cgroups = await loop.run_in_executor(None, Cgroups.open, owner)
            keeper.own([str(group.folder) for group in cgroups.groups])
            if self._state_folder is not None:
                (self._state_folder / GROUPS).write_text(json.dumps(cgroups.dump()))
            self._cgroups, self._keeper = cgroups, keeper
            return keeper

    def _template(self, name: str) -> tuple[Template, bytes]:
        """A template and its steps as the program reads them."""
        makers = {"host": host_template, "image": image_template}
        if name not in makers:
            raise SandboxUnavailable(f"the namespace backend has no template {name!r}", hint="known: host")
        if name not in self._templates:
            template = makers[name]()
            self._templates[name] = (template, pack_steps(template.steps))
        return self._templates[name]

    def _message(self, plan: Plan, words: str) -> bytes:
        assert self._cgroups is not None
        limits, number, first = plan.spec.limits, plan.number, plan.first_id
        ranged = may_map_ranges()
        has_memory = "memory" in self._cgroups.controllers
        return create_message(
            number,
            hostname=plan.spec.hostname,
            outer_ids=self._outer_ids(first),
            work_id=WORK_ID,
            disk=(limits.disk_bytes, _inodes(limits)),
            # With one id for all, the agent's own processes count too.
            num_processes=limits.pids if ranged else limits.pids + SPARE_PIDS,
            data_bytes=0 if has_memory else limits.memory_bytes,
            watch_bytes=0 if has_memory else limits.memory_bytes,
            cgroups=self._cgroups.box_folders(number, limits),
            steps=plan.steps,
            layers=plan.root.layers,
            words=words,
        )

    def _on_adopted_gone(self, number: int, box: NamespaceBox, ended: asyncio.Future[str]) -> None:
        self._on_gone(number, box, _nobody, ended.result())

    def _outer_ids(self, first: int) -> tuple[int, int, int]:
        """A range of its own; the machine's ids, where mounts map none; or the one id that an ordinary user has."""
        if not may_map_ranges():
            return os.geteuid(), os.getegid(), 1
        assert self._mounts is not None
        return (first, first, IDS_A_BOX) if self._mounts.maps_ids else (0, 0, IDS_A_BOX)

    def _on_gone(self, number: int, box: NamespaceBox, settle: Callable[[str | None], None], how: str) -> None:
        self._boxes.pop(number, None)
        settle(how)
        if box.channel is not None:
            box.channel.end(how)
        with contextlib.suppress(asyncio.InvalidStateError):
            box.gone.set_result(how)


def make(section: SandboxSection, state: Path | None) -> NamespaceBackend:
    """The backend as a recipe names it."""
    return NamespaceBackend(state_folder=state)


def _nobody(problem: str | None) -> None:
    """Hears of an adopted box, which answered long ago."""


def _limit_ms(seconds: float | None) -> int:
    return 0 if seconds is None else milliseconds(seconds)


def _settler(ready: asyncio.Future[str | None]) -> Callable[[str | None], None]:
    def settle(problem: str | None) -> None:
        if not ready.done():
            ready.set_result(problem)

    return settle


async def _mounts_of(keeper: Keeper) -> Mounts:
    """Raises SandboxUnavailable; the keeper is ended then."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return read_found(await asyncio.shield(keeper.mounts))
    except TimeoutError as error:
        await keeper.close()
        raise SandboxUnavailable(
            f"the sandbox keeper did not say how it mounts roots in {START_TIMEOUT_S:g} s",
            hint="`tandem doctor` shows what this machine can do",
        ) from error
    except BaseException:
        await keeper.close()
        raise


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
