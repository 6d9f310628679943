"""``tandem doctor`` on this machine: every feature by name, and nothing amiss where the tests can run."""

from __future__ import annotations

from pathlib import Path

from app_pieces import tandem

NEEDED = ("python", "torch", "kernel", "user namespaces", "seccomp", "native program", "a box")
OPTIONAL = ("accelerator", "CPU kernels", "model smollm2", "id ranges", "memory limit", "pids limit", "cpu limit")


def test_every_feature_is_named(place: Path):
    child = tandem("doctor", place=place)
    lines = child.out.splitlines()
    marks = {line[4:].split("  ")[0].strip(): line[:3].strip() for line in lines if not line.startswith("    ")}
    assert all(marks[name] == "ok" for name in NEEDED)
    assert all(marks[name] in ("ok", "--") for name in OPTIONAL)
    assert lines[-1].startswith("ready: ")
    child.assert_nothing_left()
