"""Building and loading the C kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import EngineError
from tandem.kernels.impl.cpu import build

REPORT = """
import re, torch
from tandem.kernels.impl.cpu.build import library
kernels = library()
maps = open("/proc/self/maps").read()
print(kernels is not None, len(set(re.findall(r"/\\S*gomp\\S*", maps))), len(set(re.findall(r"/\\S*iomp\\S*", maps))))
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_only_one_pool_of_threads_is_in_the_process(own_cache: Path):
    out = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True, timeout=300)
    assert out.stdout.split() == ["True", "1", "0"]


def test_a_build_is_kept_and_found_again(own_cache: Path):
    first = build.built("gcc")
    stamp = (first / "kernels.so").stat().st_mtime_ns
    assert build.built("gcc") == first
    assert (first / "kernels.so").stat().st_mtime_ns == stamp
    assert [path.name for path in first.iterdir()] == ["kernels.so"]


def test_other_source_is_another_build(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = build.built("gcc")
    changed = tmp_path / "attention.c"
    changed.write_text(build.SOURCES[0].read_text() + "\n")
    for header in build.HEADERS:
        (tmp_path / header.name).write_text(header.read_text())
    monkeypatch.setattr(build, "SOURCES", (changed, *build.SOURCES[1:]))
    assert build.built("gcc") != first


def test_source_that_does_not_compile_is_an_error_with_the_compilers_words(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = tmp_path / "attention.c"
    broken.write_text("int f(void) { return nowhere; }\n")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    with pytest.raises(EngineError, match="nowhere"):
        build.built("gcc")
    assert not [path for path in (own_cache / "tandem" / "kernels").iterdir() if re.match(r"\w", path.name)]
