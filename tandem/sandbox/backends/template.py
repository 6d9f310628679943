"""The ``host`` template: this machine's ``/usr`` read-only, everything else private.

Owns: the list of steps from which the box program builds a root file system in an empty, size-limited tmpfs.
Refuses: anything of the host outside system folders; no home, no ``/etc`` beyond a few harmless files.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backend import HOME

WORK_ID = 1000
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC_BINDS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "protocols",
             "services", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "java", "perl", "R")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
HIDDEN = ("kcore", "keys", "timer_list", "sched_debug", "kmsg", "kallsyms", "kpagecount", "kpageflags",
          "sysrq-trigger", "latency_stats", "cmdline", "interrupts")
READ_ONLY = ("sys", "irq", "bus", "fs")


@dataclass(frozen=True, slots=True)
class Step:
    """``kind``: d folder, h folder of the user, f file, l link, b host tree read-only, n device, t terminals,
    p proc, m hide, r make read-only (see the box program's setup)."""

    kind: str
    path: str
    argument: bytes = b""
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    steps: tuple[Step, ...]
    environment: dict[str, str]
    python: str  # where the box's python3 comes from, for people


def host_template() -> Template:
    """Built from what this machine has now.

    Raises:
        SandboxUnavailable: there is no /usr or no python3 to be found.
    """
    if not Path("/usr/bin").is_dir():
        raise SandboxUnavailable("the host template needs /usr/bin, and this machine has none")
    python_steps, python_path, python = _python()
    steps = [Step("b", "usr", b"/usr"), *_system_links(), *_folders(), *_etc(), *python_steps]
    return Template("host", (*steps, *_machine()), _environment(python_path), python)


def _machine() -> list[Step]:
    """Devices and /proc."""
    steps = [Step("n", f"dev/{name}", f"/dev/{name}".encode()) for name in DEVICES if Path(f"/dev/{name}").exists()]
    steps += [
        Step("l", "dev/fd", b"/proc/self/fd"),
        Step("l", "dev/stdin", b"/proc/self/fd/0"),
        Step("l", "dev/stdout", b"/proc/self/fd/1"),
        Step("l", "dev/stderr", b"/proc/self/fd/2"),
        Step("t", "dev/pts"),
        Step("l", "dev/ptmx", b"pts/ptmx"),
        Step("p", "proc"),
    ]
    steps += [Step("m", f"proc/{name}") for name in HIDDEN if Path(f"/proc/{name}").exists()]
    steps += [Step("r", f"proc/{name}") for name in READ_ONLY if Path(f"/proc/{name}").exists()]
    return steps


def _environment(python_path: list[str]) -> dict[str, str]:
    return {
        "PATH": ":".join([*python_path, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]),
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
    }


def image_template() -> Template:
    """What a root that brings its own system lacks: devices, /proc, and below its own files a home and names."""
    plain = ("home", "etc", "var", "run", "dev", "proc", "tmp", "root")
    steps = [
        *(Step("d", name) for name in plain if name != "tmp"),
        *(Step("d", name, mode=0o1777) for name in ("tmp", "dev/shm")),
        Step("h", HOME.lstrip("/"), mode=0o750),
        *_names(),
        *_machine(),
    ]
    return Template("image", tuple(steps), {**_environment([]), "LANG": "C.UTF-8"}, "its own")


def _system_links() -> list[Step]:
    steps = []
    for name in SYSTEM_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            steps.append(Step("l", name, os.readlink(path).encode()))
        elif path.is_dir():
            steps.append(Step("b", name, str(path).encode()))
    return steps


def _folders() -> list[Step]:
    plain = ("home", "etc", "var", "var/lib", "var/log", "var/cache", "run", "dev", "proc", "opt", "mnt", "srv", "root")
    return [
        *(Step("d", name) for name in plain),
        *(Step("d", name, mode=0o1777) for name in ("tmp", "var/tmp", "dev/shm", "run/lock")),
        Step("h", HOME.lstrip("/"), mode=0o750),
    ]


def _names() -> list[Step]:
    texts = {
        "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{WORK_ID}:{WORK_ID}:agent:{HOME}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "group": f"root:x:0:\nagent:x:{WORK_ID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "resolv.conf": "nameserver 127.0.0.1\noptions timeout:3 attempts:2\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "hostname": "box\n",
    }
    return [Step("f", f"etc/{name}", text.encode(), 0o644) for name, text in texts.items()]


def _etc() -> list[Step]:
    steps = _names()
    folders = {str(Path(name).parent) for name in ETC_BINDS if "/" in name}
    steps += [Step("d", f"etc/{folder}") for folder in sorted(folders)]
    names = [*ETC_BINDS, *(entry.name for entry in Path("/etc").glob("python3*"))]
    for name in names:
        path = Path("/etc") / name
        if path.exists() and os.access(path, os.R_OK):
            steps.append(Step("b", f"etc/{name}", str(path.resolve()).encode()))
    return steps


def _python() -> tuple[list[Step], list[str], str]:
    """A python3 in the box: the system's, else the interpreter that runs us, at its own path."""
    if (found := shutil.which("python3", path="/usr/local/bin:/usr/bin")) is not None:
        return [], [], found
    prefix = Path(sys.base_prefix).resolve()
    binary = prefix / "bin" / "python3"
    if not binary.exists():
        raise SandboxUnavailable(
            f"no python3 for the boxes: neither in /usr/bin nor at {binary}", hint="install the system's python3"
        )
    present = ("/", "/home", "/tmp", "/root", "/opt", "/var", HOME)
    parents = [str(parent) for parent in reversed(prefix.parents) if str(parent) not in present]
    steps = [Step("d", parent.lstrip("/")) for parent in parents]
    steps.append(Step("b", str(prefix).lstrip("/"), str(prefix).encode()))
    return steps, [str(prefix / "bin")], str(binary)
