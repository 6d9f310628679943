"""Compiles the box program at first use.

Owns: the binary in the user's cache, named by the digest of its sources and compiler line, so that a new version
never runs an old program. Publication is a rename: concurrent first uses are safe.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tandem.core.cache import cache_folder
from tandem.core.errors import SandboxUnavailable, boundary

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
LINKAGES = (("-static",), ())  # static takes less memory; boxes are made without exec, so either works
COMPILERS = ("musl-gcc", "gcc", "cc", "clang")


def program(cache: Path | None = None) -> Path:
    """The path of the compiled program; compiles it if it is not there (about two seconds).

    Raises:
        SandboxUnavailable: no compiler, or it fails.
    """
    sources = sorted(SOURCES.glob("*.[ch]"))
    stamp = hashlib.blake2b(" ".join((platform.machine(), *FLAGS)).encode(), digest_size=8)
    for source in sources:
        stamp.update(source.name.encode() + b"\0" + source.read_bytes())
    with boundary(SandboxUnavailable, "no folder for the sandbox's native program", hint="set XDG_CACHE_HOME"):
        target = (cache or cache_folder("sandbox")) / f"box-{stamp.hexdigest()}"
        target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        _compile([str(source) for source in sources if source.suffix == ".c"], target)
    return target


def _compile(sources: list[str], target: Path) -> None:
    compilers = [found for name in COMPILERS if (found := shutil.which(name))]
    if not compilers:
        raise SandboxUnavailable(
            "the sandbox's small native program must be compiled once, and there is no C compiler",
            hint="install gcc (Debian: apt install gcc libc6-dev)",
        )
    problems = []
    for compiler in compilers:
        for linkage in LINKAGES:
            problem = _try([compiler, *FLAGS, *linkage, *sources], target)
            if problem is None:
                return
            problems.append(f"{compiler}: {problem}")
    raise SandboxUnavailable(
        "the sandbox's native program does not compile: " + "; ".join(problems),
        hint="the C library's and the kernel's headers are needed (Debian: apt install gcc libc6-dev linux-libc-dev)",
    )


def _try(command: list[str], target: Path) -> str | None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / "box"
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return "not done after 120 s"
        if done.returncode != 0:
            return done.stderr.strip()[-600:]
        made.chmod(0o755)
        made.rename(target)
        return None
