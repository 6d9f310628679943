"""What this machine can do for boxes: the facts behind ``tandem doctor`` and behind the hint of a failed start.

Owns: the list of features with what was found and what to do. The last one is the proof: a box that was made,
ran a command, and went.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxUnavailable, TandemError
from tandem.sandbox.backend import Call
from tandem.sandbox.backends.build import program
from tandem.sandbox.backends.cgroups import CONTROLLERS, Cgroups
from tandem.sandbox.backends.live_fork import obstacle
from tandem.sandbox.backends.mounts import Mounts, MountWay
from tandem.sandbox.backends.namespace import NamespaceBackend, may_map_ranges
from tandem.sandbox.backends.paging import has_swap, swap_free
from tandem.sandbox.backends.remote import INSTALL
from tandem.sandbox.backends.runsc import Runsc

OLDEST_KERNEL = (5, 14)  # mount_setattr, clone3 into a cgroup, close_range, process limits per user namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """``ok`` False: nothing goes without it. None: it is absent, and ``detail`` says what takes its place."""

    feature: str
    ok: bool | None
    detail: str
    remedy: str = ""


def probe(*, cache: Path | None = None) -> list[Feature]:
    """Look at everything, last of all at a real box. Takes well under a second once the program is compiled. Runs an
    event loop of its own: call it from a thread that has none."""
    features = [_kernel(), _namespaces(), _seccomp(), _program(cache), _ids(), *_groups(), _live_fork(), _cold_pause(),
                _gvisor(), _remote()]  # fmt: skip
    return [*features, *asyncio.run(_box(cache))]


def _kernel() -> Feature:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    good = platform.system() == "Linux" and numbers >= OLDEST_KERNEL
    oldest = ".".join(map(str, OLDEST_KERNEL))
    return Feature(
        feature="kernel", ok=good, detail=f"{platform.system()} {release}",
        remedy="" if good else f"Linux {oldest} or newer",
    )


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def _namespaces() -> Feature:
    wrong = []
    if _sysctl("user.max_user_namespaces") in (None, "0"):
        wrong.append("user.max_user_namespaces=10000")
    if os.geteuid() != 0 and _sysctl("kernel.unprivileged_userns_clone") == "0":
        wrong.append("kernel.unprivileged_userns_clone=1")
    if os.geteuid() != 0 and _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        wrong.append("kernel.apparmor_restrict_unprivileged_userns=0")
    return Feature(
        feature="user namespaces",
        ok=not wrong,
        detail="switched off" if wrong else "as root" if os.geteuid() == 0 else "as an ordinary user",
        remedy=f"sysctl -w {' '.join(wrong)}, or run as root" if wrong else "",
    )


def _seccomp() -> Feature:
    actions = _sysctl("kernel.seccomp.actions_avail")
    return Feature(
        feature="seccomp", ok=actions is not None, detail=actions or "not in this kernel",
        remedy="" if actions else "a kernel with CONFIG_SECCOMP_FILTER",
    )


def _program(cache: Path | None) -> Feature:
    try:
        return Feature(feature="native program", ok=True, detail=str(program(cache)))
    except TandemError as error:
        return Feature(feature="native program", ok=False, detail=error.message, remedy=error.hint)


def _ids() -> Feature:
    if may_map_ranges():
        return Feature(feature="id ranges", ok=True, detail="each box has 65536 ids of its own")
    return Feature(
        feature="id ranges", ok=None,
        detail="one id for all of a box; its user also owns the box's system folders",
        remedy="run as root for stronger separation",
    )


def _live_fork() -> Feature:
    why = obstacle() or ("" if may_map_ranges() else "boxes have one id only")
    return Feature(
        feature="live fork", ok=None if why else True,
        detail=f"none: {why}; forks are of files" if why else "of one interpreter or shell",
        remedy="run as root on x86-64, outside seccomp filters" if why else "",
    )


def _cold_pause() -> Feature:
    if has_swap():
        return Feature(feature="cold pause", ok=True, detail=f"{swap_free() >> 20} MiB of swap are free for it")
    return Feature(
        feature="cold pause", ok=None, detail="none: no swap; a pause keeps the box's memory",
        remedy="swap, for instance: zramctl --find --size 4G --algorithm lz4, then mkswap and swapon of what it names",
    )


def _groups() -> list[Feature]:
    groups = Cgroups.open()
    instead = {
        "memory": "limited by process, and by a watch on their sum",
        "pids": "limited by RLIMIT_NPROC",
        "cpu": "not limited",
    }
    try:
        features = []
        for name in CONTROLLERS:
            version = next((2 if group.unified else 1 for group in groups.groups if name in group.controllers), None)
            features.append(Feature(
                feature=f"{name} limit", ok=True if version else None,
                detail=f"cgroup version {version}" if version else instead[name],
                remedy="" if version else "run as root, or under systemd-run --user --scope -p Delegate=yes",
            ))
        return features
    finally:
        groups.close()


def _roots(mounts: Mounts | None) -> list[Feature]:
    """How roots are made, once a box was."""
    if mounts is None:
        return []
    features = [Feature(
        feature="roots", ok=True if mounts.way is MountWay.DETACHED else None, detail=mounts.detail,
        remedy="" if mounts.way is MountWay.DETACHED else "nothing is missing; Linux 6.15 or newer makes them faster",
    )]
    if may_map_ranges() and not mounts.maps_ids:
        features.append(Feature(
            feature="mapped ids", ok=None, detail="mounts map no ids: boxes have this machine's ids 0 to 65535",
            remedy="Linux 6.3 or newer for a range of ids for each box",
        ))
    return features


def _gvisor() -> Feature:
    try:
        found = Runsc.find()
    except SandboxUnavailable as error:
        return Feature(feature="gvisor backend", ok=None, detail=error.message, remedy=error.hint)
    return Feature(feature="gvisor backend", ok=True, detail=f"runsc of {found.version} at {found.program}")


def _remote() -> Feature:
    try:
        version = importlib.metadata.version("e2b")
    except importlib.metadata.PackageNotFoundError:
        return Feature(feature="remote backend", ok=None, detail="E2B's SDK is not installed", remedy=INSTALL)
    return Feature(feature="remote backend", ok=True, detail=f"through e2b {version}; sandbox.remote.url says where")


async def _box(cache: Path | None) -> list[Feature]:
    backend = NamespaceBackend(cache=cache)
    call = Call(arguments=["python3", "-c", "print(6 * 7)"], timeout_s=10, stdout_cap_bytes=100, stderr_cap_bytes=2000)
    try:
        await (await backend.create(SandboxSpec(), timeout_s=10)).kill()  # the first also starts the keeper
        started = time.perf_counter()
        box = await backend.create(SandboxSpec(), timeout_s=10)
        created_ms = (time.perf_counter() - started) * 1000
        outcome = await box.call(call)
    except TandemError as error:
        return [*_roots(backend.mounts), Feature(feature="a box", ok=False, detail=error.message, remedy=error.hint)]
    finally:
        await backend.close()
    roots = _roots(backend.mounts)
    if outcome.stdout.strip() != b"42":
        return [*roots, Feature(
            feature="a box", ok=False,
            detail=f"python3 fails in it: {outcome.stderr.decode('utf-8', 'replace')[-500:]}",
            remedy="install the system's python3",
        )]
    detail = f"made in {created_ms:.1f} ms; python3 is {backend.python()}"
    return [*roots, Feature(feature="a box", ok=True, detail=detail)]
