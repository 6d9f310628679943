"""Holding a box still: the freezer of its control group where there is one, else stop signals to its processes.

Owns: the wait until all processes stand. Refuses: to call a box paused that still
runs. A killed box ends from any of these states.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tandem.core.errors import SandboxError
from tandem.sandbox.backends.cgroups import Group
from tandem.sandbox.backends.paging import Pager

PAUSE_TIMEOUT_S = 5.0


class Freezer:
    """Of one box: ``folders`` are its control groups, ``agent`` its first process."""

    def __init__(self, folders: list[tuple[Group, Path]], agent: int) -> None:
        self.agent = agent
        self._unified = next((folder for group, folder in folders if group.unified), None)
        self._legacy = next((folder for group, folder in folders if "freezer" in group.controllers), None)
        self._pager = Pager(folders)

    @property
    def holds_the_dead(self) -> bool:
        """Whether a killed process cannot end before the thaw."""
        return self._unified is None and self._legacy is not None

    def frozen(self) -> bool:
        try:
            if self._unified is not None:
                return "frozen 1" in (self._unified / "cgroup.events").read_text()
            if self._legacy is not None:
                return (self._legacy / "freezer.state").read_text().strip() == "FROZEN"
            return Path(f"/proc/{self.agent}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    async def freeze(self) -> None:
        """Raises SandboxError: it does not stand still in time (it runs again then)."""
        if self._unified is not None:
            await self._written(self._unified / "cgroup.freeze", "1", self._unified / "cgroup.events", "frozen 1")
        elif self._legacy is not None:
            state = self._legacy / "freezer.state"
            await self._written(state, "FROZEN", state, "FROZEN")
        else:
            await self._stop_all()

    def thaw(self) -> None:
        try:
            if self._unified is not None:
                (self._unified / "cgroup.freeze").write_text("0")
            elif self._legacy is not None:
                (self._legacy / "freezer.state").write_text("THAWED")
            else:
                for pid in reversed(self.processes()):
                    _signal(pid, signal.SIGCONT)
        except FileNotFoundError:
            return  # it is gone, and so is its group

    def processes(self) -> list[int]:
        """The box's processes. Below the agent there are also those of boxes that live forks made of this one: the
        control group, where there is one, knows better."""
        folder = self._unified or self._legacy
        if folder is None:
            return [self.agent, *_below(self.agent)]
        try:
            return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            return []

    def cpu_s(self) -> float | None:
        """CPU seconds of the processes there are and of those they waited for; where no group counts them."""
        ticks = 0
        for pid in self.processes():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK") if ticks else None

    async def page_out(self) -> None:
        """Give the memory of a frozen box to swap. Raises as ``Pager.push_out``."""
        await asyncio.get_running_loop().run_in_executor(None, self._pager.push_out, self.processes())

    async def _written(self, path: Path, value: str, told: Path, word: str) -> None:
        try:
            path.write_text(value)
            for tries in range(int(PAUSE_TIMEOUT_S * 1000)):
                if word in told.read_text():
                    return
                await asyncio.sleep(0 if tries < 20 else 0.001)
        except FileNotFoundError as error:
            raise SandboxError("it is gone", hint="create a new one") from error
        self.thaw()
        raise SandboxError(f"it does not stand still after {PAUSE_TIMEOUT_S:g} s", hint="try again, or kill it")

    async def _stop_all(self) -> None:
        """Stop the agent, then all below it, until a pass finds nobody new: who is stopped does not fork."""
        stopped: set[int] = set()
        for _ in range(200):
            new = [pid for pid in self.processes() if pid not in stopped]
            if not new:
                return
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped.update(new)
            await asyncio.sleep(0)
        self.thaw()
        raise SandboxError("its processes multiply faster than they can be stopped", hint="kill it")


def _below(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for task in tasks:
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_below(child)]
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
