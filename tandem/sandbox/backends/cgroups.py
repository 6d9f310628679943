"""Control groups as this machine has them: version 2, version 1, both at once, or none that we may use.

Owns: one folder a hierarchy for this supervisor, named by process namespace, pid and start time, with one folder a
box below it. Limits come from version 2 where it has the controller, else from version 1.
Refuses: to guess; a controller that cannot be used is reported as missing, and the caller falls back to rlimits.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.core.boxes import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
SPARE_PIDS = 16  # for the agent, the shims in front of commands, and file operations
SOCKET_SHARE = 4  # sockets may hold this part of its memory, beside the rest
SPARE_BYTES = 32 * 2**20  # so that a full disk (files live in memory) never starves the agent
KILLS = b"\noom_kill "
OWNER = re.compile(r"tandem-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Group:
    """One folder of this supervisor in one hierarchy."""

    folder: Path
    unified: bool
    controllers: tuple[str, ...]


def memory_ceiling(limits: SandboxLimits) -> int:
    return max(limits.memory_bytes, limits.disk_bytes + SPARE_BYTES)


class Cgroups:
    """The groups of one supervisor."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.controllers = {name for group in groups for name in group.controllers}
        self._kills = next(
            ((str(group.folder), "memory.events" if group.unified else "memory.oom_control")
             for group in groups if "memory" in group.controllers), None,
        )

    @classmethod
    def open(cls, owner: int | None = None) -> Cgroups:
        """Make folders wherever this process may; they are garbage when ``owner`` (None: this process) is dead."""
        owner = owner or os.getpid()
        name = f"tandem-{_namespace()}-{owner}-{_start_time(owner)}-{secrets.token_hex(3)}"
        unified, legacy = _hierarchies()
        groups: list[Group] = []
        if unified is not None and (group := _open_unified(*unified, name)) is not None:
            groups.append(group)
        taken = {controller for group in groups for controller in group.controllers}
        by_folder: dict[Path, list[str]] = {}
        for controller, folder in legacy.items():
            wanted = (*CONTROLLERS, "freezer") if unified is None else CONTROLLERS
            if controller in wanted and controller not in taken:
                by_folder.setdefault(folder, []).append(controller)
        for folder, controllers in by_folder.items():
            with contextlib.suppress(OSError):
                (folder / name).mkdir()
                groups.append(Group(folder / name, False, tuple(controllers)))
        return cls(tuple(groups))

    def dump(self) -> list[tuple[str, bool, list[str]]]:
        return [(str(group.folder), group.unified, list(group.controllers)) for group in self.groups]

    @classmethod
    def load(cls, dumped: list[tuple[str, bool, list[str]]]) -> Cgroups:
        return cls(tuple(Group(Path(folder), unified, tuple(names)) for folder, unified, names in dumped))

    def box_folders(self, box: int, limits: SandboxLimits) -> list[tuple[str, bool, list[tuple[str, str]]]]:
        """For the keeper: folders to make, whether they are version 2, and the values to write into them."""
        return [
            (str(group.folder / f"box-{box}"), group.unified, _values(group, limits)) for group in self.groups
        ]

    def folders_of(self, box: int) -> list[tuple[Group, Path]]:
        return [(group, group.folder / f"box-{box}") for group in self.groups]

    def number(self, box: int, controller: str, *, unified: str, legacy: str) -> int | None:
        """One number of a controller's files (named for each version) about a box; None where there is none."""
        for group, folder in self.folders_of(box):
            if controller in group.controllers:
                with contextlib.suppress(OSError, ValueError):
                    return int((folder / (unified if group.unified else legacy)).read_text())
        return None

    def cpu_s(self, box: int) -> float | None:
        """CPU seconds of a box, ended processes included. Version 2 tells them without the controller, too."""
        for group, folder in self.folders_of(box):
            with contextlib.suppress(OSError, ValueError):
                if group.unified:
                    found = re.search(r"^usage_usec (\d+)", (folder / "cpu.stat").read_text(), re.MULTILINE)
                    if found:
                        return int(found[1]) / 1e6
                elif (folder / "cpuacct.usage").exists():  # one hierarchy with ``cpu`` on most machines
                    return int((folder / "cpuacct.usage").read_text()) / 1e9
        return None

    def oom_kills(self, box: int) -> int:
        """How many processes of the box the kernel has killed for memory; 0 where it does not say."""
        if self._kills is None:
            return 0
        try:  # twice a command: ways with more comfort take four times as long
            descriptor = os.open(f"{self._kills[0]}/box-{box}/{self._kills[1]}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            text = b"\n" + os.read(descriptor, 4096)
        except OSError:
            return 0
        finally:
            os.close(descriptor)
        at = text.find(KILLS)
        return int(text[at + len(KILLS):].split(b"\n", 1)[0]) if at >= 0 else 0

    def close(self) -> None:
        for group in self.groups:
            _remove(group.folder)


def sweep() -> int:
    """Remove what dead supervisors of this process namespace left behind; returns the number of folders."""
    unified, legacy = _hierarchies()
    parents = set(legacy.values())
    if unified is not None:
        mount, own = unified
        parents.update(_ancestors(mount, own))
    removed = 0
    for parent in parents:
        try:
            names = [entry.name for entry in os.scandir(parent) if entry.name.startswith("tandem-")]
        except OSError:
            continue
        for name in names:
            match = OWNER.fullmatch(name)
            if match is None or int(match[1]) != _namespace() or _start_time(int(match[2])) == int(match[3]):
                continue
            removed += _remove(parent / name)
    return removed


def _remove(folder: Path) -> bool:
    """Kill what is in a folder's groups and remove them; what the kernel still holds after a second stays."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            children = [entry.path for entry in os.scandir(folder) if entry.is_dir()]
        except OSError:
            return False
        for child in children:
            for pid in _processes(Path(child)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.rmdir(child)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def _processes(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _values(group: Group, limits: SandboxLimits) -> list[tuple[str, str]]:
    memory, pids = str(memory_ceiling(limits)), str(limits.pids + SPARE_PIDS)
    quota = str(max(1000, round(limits.cpus * CPU_PERIOD_US)))
    values: list[tuple[str, str]] = []
    if "memory" in group.controllers:
        if group.unified:
            values.append(("memory.max", memory))
            if (group.folder / "memory.swap.max").exists():
                values.append(("memory.swap.max", "0"))
        else:
            values.append(("memory.limit_in_bytes", memory))
            if (group.folder / "memory.memsw.limit_in_bytes").exists():
                values.append(("memory.memsw.limit_in_bytes", memory))
            # What sockets hold is counted apart here, and only where a limit is set; version 2 counts it as memory.
            if (group.folder / "memory.kmem.tcp.limit_in_bytes").exists():
                values.append(("memory.kmem.tcp.limit_in_bytes", str(limits.memory_bytes // SOCKET_SHARE)))
    if "pids" in group.controllers:
        values.append(("pids.max", pids))
    if "cpu" in group.controllers:
        if group.unified:
            values.append(("cpu.max", f"{quota} {CPU_PERIOD_US}"))
        elif (group.folder / "cpu.cfs_quota_us").exists():
            values += [("cpu.cfs_period_us", str(CPU_PERIOD_US)), ("cpu.cfs_quota_us", quota)]
    return values


def _open_unified(mount: Path, own: Path, name: str) -> Group | None:
    """The nearest ancestor that lets us hand controllers down; failing that, the nearest that lets us make groups
    at all (they still serve to freeze and kill)."""
    plain: Path | None = None
    for parent in _ancestors(mount, own):
        if not os.access(parent / "cgroup.procs", os.W_OK):  # boxes could not be born into a group below it
            continue
        try:
            (parent / name).mkdir()
        except OSError:
            continue
        enabled = _enable(parent, parent / name)
        if enabled:
            if plain is not None:
                plain.rmdir()
            return Group(parent / name, True, enabled)
        if plain is None:
            plain = parent / name
        else:
            (parent / name).rmdir()
    return None if plain is None else Group(plain, True, ())


def _enable(parent: Path, folder: Path) -> tuple[str, ...]:
    for target in (parent, folder):
        for controller in CONTROLLERS:
            with contextlib.suppress(OSError):
                (target / "cgroup.subtree_control").write_text(f"+{controller}")
    try:
        enabled = (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return ()
    return tuple(controller for controller in CONTROLLERS if controller in enabled)


def _ancestors(mount: Path, own: Path) -> list[Path]:
    folders = [own]
    while folders[-1] != mount and mount in folders[-1].parents:
        folders.append(folders[-1].parent)
    return folders


def _hierarchies() -> tuple[tuple[Path, Path] | None, dict[str, Path]]:
    """((version 2 mount, own group), {version 1 controller: own group})."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    unified: tuple[Path, Path] | None = None
    legacy: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        root, mount = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" and "" in own:
            unified = (Path(mount), _inside(mount, root, own[""]))
        elif kind == "cgroup":
            for controller in options.split(","):
                if controller in own:
                    legacy[controller] = _inside(mount, root, own[controller])
    return unified, legacy


def _inside(mount: str, root: str, path: str) -> Path:
    relative = path[len(root):] if root != "/" and path.startswith(root) else path
    folder = Path(mount) / relative.strip("/")
    return folder if folder.is_dir() else Path(mount)


def _namespace() -> int:
    return int(re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")))


def _start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1
