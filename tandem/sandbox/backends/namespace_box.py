"""One live box of the namespace backend: calls, standing still, snapshots, its end.

Owns: the order of a box's moves (one at a time; a kill waits for none), and which layers its root is made of.
Refuses: to take a snapshot of files that could still change below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tandem.core.boxes import NetworkPolicy, SandboxSpec
from tandem.core.errors import SandboxError, SandboxGone, SandboxTimeout, SnapshotError
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Call, Layer, Outcome, Root, Start, Usage
from tandem.sandbox.backends.cgroups import Cgroups
from tandem.sandbox.backends.channel import Channel
from tandem.sandbox.backends.frames import Frame
from tandem.sandbox.backends.freezer import Freezer
from tandem.sandbox.backends.frozen import NamespaceFrozen, copy_layer
from tandem.sandbox.backends.keeper import BusyFiles, Keeper, Pushed
from tandem.sandbox.backends.link import opened
from tandem.sandbox.backends.live_fork import only_process, stand_still
from tandem.sandbox.backends.merge import MERGE_AT, merge_layers
from tandem.sandbox.backends.process import NamespaceProcess
from tandem.sandbox.network.attempts import Tell
from tandem.sandbox.network.budget import Budget
from tandem.sandbox.network.gate import ENVIRONMENT, NAME_PORT, PROXY_PORT, Gate
from tandem.sandbox.network.names import Names
from tandem.sandbox.network.policy import Policy

KILL_TIMEOUT_S = 15.0


class Surroundings(Protocol):
    """What a box needs of its backend."""

    @property
    def keeper(self) -> Keeper: ...

    @property
    def cgroups(self) -> Cgroups | None: ...

    @property
    def names(self) -> Names: ...

    @property
    def abilities(self) -> frozenset[Ability]: ...

    async def branch(
        self, mother: NamespaceBox, spec: SandboxSpec, root: Root, process: NamespaceProcess, *, timeout_s: float
    ) -> NamespaceBox: ...


class NamespaceBox:
    """``handle`` '' : the box dies with this process."""

    def __init__(
        self, number: int, around: Surroundings, *, root: Root, handle: str = "", first_id: int = 0
    ) -> None:
        """``first_id``: where its range of ids begins on the host."""
        self._number = number
        self.first_id = first_id
        self.carried: NamespaceProcess | None = None
        self._around = around
        self._root = root
        self._moving = asyncio.Lock()
        self._freezer: Freezer | None = None
        self._gate: Gate | None = None
        self._copies = 0
        self._uppers: dict[Path, Pushed] = {}  # of its layers, those that were its own
        self._merging: asyncio.Task[None] | None = None
        self._merge_at = MERGE_AT
        self.paused = False
        self.handle = handle
        self.channel: Channel | None = None
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.gone.add_done_callback(lambda _: self._shut_gate())

    @property
    def number(self) -> int:
        return self._number

    @property
    def root(self) -> Root:
        return self._root

    @property
    def carried_start(self) -> Start | None:
        return None if self.carried is None else self.carried.start

    def carry(self, process: NamespaceProcess) -> int:
        """It is born with a copy of a process; its number as a command."""
        assert self.channel is not None
        number, self.carried = self.channel.carry(process.start)
        return number

    async def call(self, call: Call) -> Outcome:
        if self.channel is None or self.gone.done():
            raise SandboxGone("it is gone", hint="create a new one")
        oom_before = self._oom_kills()
        try:
            outcome = await self.channel.call(call)
        except SandboxTimeout:
            self._around.keeper.kill(self._number)
            raise
        if outcome.oom_killed or self._oom_kills() == oom_before:
            return outcome
        return replace(outcome, oom_killed=True)

    async def start(self, start: Start) -> NamespaceProcess:
        try:
            return await self._alive().start(start)
        except SandboxTimeout:
            self._around.keeper.kill(self._number)
            raise

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await opened(await self._alive().socket(Frame.CONNECT, port))
        except ConnectionRefusedError as refused:
            try:
                return await opened(await self._alive().socket(Frame.CONNECT, port, v6=True))
            except SandboxError:
                raise
            except OSError as error:  # the box may have no IPv6
                raise refused from error

    async def set_network(self, policy: NetworkPolicy, tell: Tell, budget: Budget | None = None) -> None:
        """What it forbids is cut at once; the proxy of a paused box is there from its resume on."""
        async with self._moving:
            channel = self._alive()
            parsed = Policy(policy)
            if self._gate is not None:
                self._gate.change(parsed)
            if policy.none:
                self._shut_gate()
                return
            if self._gate is None:
                self._gate = Gate(parsed, self._around.names, tell, lambda: self.paused, budget)
            channel.set_network_environment(ENVIRONMENT)
            if not self.paused:
                try:
                    await self._open_gate()
                except BaseException:
                    self._shut_gate()
                    raise

    async def _open_gate(self) -> None:
        """Its sockets are the host's, but in the box's network: only the box's agent can make them, so it must run."""
        if self._gate is None or self._gate.open:
            return

        async def listen(port: int, datagrams: bool) -> socket.socket:
            return await self._alive().socket(Frame.LISTEN, port, datagrams=datagrams)

        try:
            await self._gate.start(listen)
        except OSError as error:
            raise SandboxError(
                f"its proxy cannot listen in it: {error.strerror or error}",
                hint=f"end what listens on port {PROXY_PORT} (or {NAME_PORT}, by UDP) in the box",
            ) from error

    def _shut_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self.channel is not None:
            self.channel.set_network_environment({})

    async def usage(self) -> Usage:
        """Files count as memory, too. What neither a control group of ours nor /proc tells is None."""
        self._alive()
        groups, box, freezer = self._around.cgroups, self._number, self._freezer_now()
        disk, total = _disk(freezer.agent)
        if groups is None:
            return Usage(cpu_s=freezer.cpu_s(), processes=len(freezer.processes()), disk_bytes=disk,
                         disk_total_bytes=total)
        cpu_s = groups.cpu_s(box)
        processes = groups.number(box, "pids", unified="pids.current", legacy="pids.current")
        return Usage(
            cpu_s=freezer.cpu_s() if cpu_s is None else cpu_s,
            memory_bytes=groups.number(box, "memory", unified="memory.current", legacy="memory.usage_in_bytes"),
            memory_peak_bytes=groups.number(box, "memory", unified="memory.peak", legacy="memory.max_usage_in_bytes"),
            processes=len(freezer.processes()) if processes is None else processes,
            disk_bytes=disk, disk_total_bytes=total,
        )

    def _alive(self) -> Channel:
        if self.channel is None or self.gone.done():
            raise SandboxGone("it is gone", hint="create a new one")
        return self.channel

    async def pause(self, *, cold: bool = False) -> None:
        """Raises SandboxGone, SandboxError (it does not stand still), SandboxUnavailable (``cold`` without swap)."""
        async with self._moving:
            freezer = self._freezer_now()
            if not self.paused:
                await freezer.freeze()
                self._stand()
            if cold:
                await freezer.page_out()

    async def resume(self) -> None:
        async with self._moving:
            self._freezer_now()
            self._go()
            await self._open_gate()

    async def snapshot(self, *, live: bool = False) -> NamespaceFrozen:
        """The upper becomes a layer in a few milliseconds; where a process holds files of it, it is copied.

        Raises:
            SandboxUnavailable: ``live``.
            SnapshotError: no room for the copy, no layers on this kernel.
        """
        if live:
            raise refuse("namespace", Ability.LIVE_SNAPSHOT)
        async with self._moving:
            freezer, was_paused = self._freezer_now(), self.paused
            if not was_paused:
                await freezer.freeze()
            try:
                return await self._freeze_files()
            finally:
                if not was_paused:
                    freezer.thaw()

    async def fork(self, specs: Sequence[SandboxSpec], *, timeout_s: float) -> list[Box | Exception]:
        """Copies of its one long-lived command, which must wait for input; see ``live_fork``."""
        if Ability.LIVE_FORK not in self._around.abilities:
            raise refuse("namespace", Ability.LIVE_FORK)
        async with self._moving:
            was_paused = self.paused
            self._go()
            try:
                process = only_process(self._alive().processes)
                async with stand_still(self._around.keeper, self._number, process) as pushed:
                    if pushed is not None:
                        layer = Layer(path=Path(pushed.path))
                        self._root = replace(self._root, layers=(layer, *self._root.layers))
                        self._uppers[layer.path] = pushed
                        self._merge_later()
                    try:
                        return await self._branches(specs, process, timeout_s)
                    finally:
                        if pushed is not None:
                            self._around.keeper.release(pushed.path)
            finally:
                if was_paused and not self.gone.done():
                    await self._freezer_now().freeze()
                    self._stand()

    async def _branches(
        self, specs: Sequence[SandboxSpec], process: NamespaceProcess, timeout_s: float
    ) -> list[Box | Exception]:
        """One after the other: there is one process to copy."""
        root = self._root
        made: list[Box | Exception] = []
        try:
            for spec in specs:
                try:
                    made.append(await self._around.branch(self, spec, root, process, timeout_s=timeout_s))
                except SandboxError as error:
                    made.append(error)
        except BaseException:
            await asyncio.shield(asyncio.gather(*(box.kill() for box in made if not isinstance(box, Exception))))
            raise
        return made

    async def kill(self) -> None:
        if self.gone.done():
            return
        self._around.keeper.kill(self._number)
        if self.paused and self._freezer is not None and self._freezer.holds_the_dead:
            self._freezer.thaw()
        try:
            await asyncio.wait_for(asyncio.shield(self.gone), KILL_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxTimeout(f"it is not gone {KILL_TIMEOUT_S:g} s after its kill") from error

    def find_still(self) -> None:
        """Of an adopted box: it stands if it was left so."""
        if self._freezer_now().frozen():
            self._stand()

    def _stand(self) -> None:
        self.paused = True
        if self.channel is not None:
            self.channel.pause()

    def _go(self) -> None:
        if self.paused:
            if self.channel is not None:
                self.channel.resume()
            self.paused = False
        self._freezer_now().thaw()

    def _freezer_now(self) -> Freezer:
        agent = self._around.keeper.pids.get(self._number)
        if self.gone.done() or agent is None:
            raise SandboxGone("it is gone", hint="create a new one")
        if self._freezer is None:
            cgroups = self._around.cgroups
            self._freezer = Freezer([] if cgroups is None else cgroups.folders_of(self._number), agent)
        return self._freezer

    async def _freeze_files(self) -> NamespaceFrozen:
        keeper, held = self._around.keeper, self._held()
        try:
            pushed = await keeper.push(self._number)
            path = pushed.path
        except BusyFiles as busy:
            self._copies += 1
            target = Path(busy.tmpfs) / f"copy{self._copies}"
            try:
                await asyncio.to_thread(copy_layer, Path(busy.tmpfs) / busy.upper, target)
            except OSError as error:
                raise SnapshotError(
                    f"its files could not be copied ({busy.reason}): {error}",
                    hint="end its commands, or give it more disk",
                ) from error
            path = await keeper.hold(self._number, str(target))
            root = replace(self._root, layers=(Layer(path=Path(path)), *self._root.layers))
        else:
            root = self._root = replace(self._root, layers=(Layer(path=Path(path)), *self._root.layers))
            self._uppers[Path(path)] = pushed
            self._merge_later()
        for each in held:
            keeper.share(str(each))
        return NamespaceFrozen(root, (Path(path), *held), keeper.release)

    def _merge_later(self) -> None:
        """Of a long chain of its own layers one is made, beside all else."""
        layers = self._root.layers
        count = next((at for at, layer in enumerate(layers) if layer.path not in self._uppers), len(layers))
        if count >= self._merge_at and (self._merging is None or self._merging.done()):
            self._merge_at = count + MERGE_AT  # should it fail
            self._merging = asyncio.get_running_loop().create_task(self._merge(layers[:count]))

    async def _merge(self, run: Sequence[Layer]) -> None:
        """What fails here leaves the chain as it was: longer, not wrong."""
        pushed = [self._uppers[layer.path] for layer in run]
        self._copies += 1
        target = f"merged{self._copies}"
        with contextlib.suppress(OSError, SandboxError):
            device = os.stat(run[0].path).st_dev
            await asyncio.to_thread(
                merge_layers, pushed[0].tmpfs, [each.upper for each in pushed], target, device=device
            )
            async with self._moving:
                keeper = self._around.keeper
                path = await keeper.hold(self._number, f"{pushed[0].tmpfs}/{target}")
                layers = list(self._root.layers)
                at = layers.index(run[0])
                layers[at : at + len(run)] = [Layer(path=Path(path))]
                keeper.merged(self._number, path, str(run[0].path), len(run))
                keeper.release(path)  # the box's root holds it from here on
                self._root = replace(self._root, layers=tuple(layers))
                for layer in run:
                    del self._uppers[layer.path]
                self._uppers[Path(path)] = Pushed(path, pushed[0].tmpfs, target)
                self._merge_at = MERGE_AT

    def _held(self) -> tuple[Path, ...]:
        """Layers in memory that its root stands on already."""
        mark = f"/proc/{self._around.keeper.pid}/fd/"
        return tuple(layer.path for layer in self._root.layers if str(layer.path).startswith(mark))

    def _oom_kills(self) -> int:
        cgroups = self._around.cgroups
        return 0 if cgroups is None else cgroups.oom_kills(self._number)



def _disk(agent: int) -> tuple[int | None, int | None]:
    """Bytes used of the box's own files, and how many there may be; None where its root may not be looked at."""
    try:
        told = os.statvfs(f"/proc/{agent}/root")
    except OSError:
        return None, None
    return (told.f_blocks - told.f_bfree) * told.f_frsize, told.f_blocks * told.f_frsize
