"""Builds the CPU kernels at first use and loads them.

Owns: the compiler call and its cache entry, keyed by source, compiler, flags and processor. The library is linked
without an OpenMP runtime of its own: its calls resolve to the one that PyTorch has loaded, because two pools of
threads on the same cores spin against each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from tandem.core.cache import cache_folder, make_folder
from tandem.core.errors import EngineError, boundary

UNITS = ("attention", "decoder", "head", "moving", "pack", "projection", "rows", "whole")
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in UNITS)
HEADERS = tuple(Path(__file__).with_name(f"{name}.h") for name in ("kernels", "moving", "vectors"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC")
COMPILE_TIMEOUT_S = 120


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels; None where there is no C compiler or no OpenMP runtime to join (PyTorch's own
    operations do the work then). Broken source is an error, not a fallback."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    runtime = _openmp_runtime()
    if compiler is None or runtime is None:
        return None
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(built(compiler) / "kernels.so"), mode=os.RTLD_NOW)


def built(compiler: str) -> Path:
    """The folder with the library, compiled if this machine has not done so before.

    Raises:
        EngineError: the compiler fails; the message holds what it said.
    """
    version = _run([compiler, "--version"])
    source = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
    key = hashlib.sha256(source + version + " ".join(FLAGS).encode() + _processor()).hexdigest()[:16]

    def build(folder: Path) -> None:
        units = [folder / f"{path.stem}.o" for path in SOURCES]
        for path, unit in zip(SOURCES, units, strict=True):
            _run([compiler, *FLAGS, "-c", str(path), "-o", str(unit)])
        _run([compiler, "-shared", *map(str, units), "-o", str(folder / "kernels.so"), "-lm"])
        for unit in units:
            unit.unlink()

    return make_folder(cache_folder("kernels") / key, build)


def _run(command: list[str]) -> bytes:
    with boundary(EngineError, f"building the CPU kernels with {command[0]}"):
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            raise EngineError(f"{' '.join(command)} failed:\n{done.stderr.decode(errors='replace')}")
        return done.stdout


def _openmp_runtime() -> str | None:
    """Path of the OpenMP runtime that this process (PyTorch) has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return None
    found = re.search(r"(/\S*libgomp\S*\.so\S*)", maps.read_text())
    return found[1] if found else None


def _processor() -> bytes:
    """What ``-march=native`` depends on: a cache folder on a shared home may meet another processor."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return b""
    return "".join(sorted(set(re.findall(r"^(?:model name|flags)\s*:.*$", info.read_text(), re.MULTILINE)))).encode()
