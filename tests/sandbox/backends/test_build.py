from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.core.errors import SandboxUnavailable
from tandem.sandbox.backends import build


def test_concurrent_first_uses_make_one_static_program(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(build.program, [tmp_path, tmp_path])
    assert first == second and first.stat().st_mode & 0o111
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    done = subprocess.run([first], capture_output=True, text=True, env={})
    assert done.returncode == 2 and "not by hand" in done.stderr


def test_without_a_compiler_the_hint_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable) as caught:
        build.program(tmp_path)
    assert "gcc" in caught.value.hint


def test_a_broken_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'cannot find -lc' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(build, "COMPILERS", ("gcc",))
    with pytest.raises(SandboxUnavailable, match="cannot find -lc"):
        build.program(tmp_path / "cache")
