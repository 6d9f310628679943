"""Entries of the cache appear whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tandem.core.cache import cache_folder, make_folder
from tandem.core.errors import ConfigError


def fill(folder: Path) -> None:
    (folder / "one.txt").write_text("1")
    time.sleep(0.05)
    (folder / "two.txt").write_text("2")


def fill_and_count(folder: Path) -> None:
    with open(folder.parent / "builds.txt", "a") as handle:
        handle.write("x")
    fill(folder)


def make(target: Path) -> None:
    make_folder(target, fill_and_count)


def die_half_way(target: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "one.txt").write_text("1")
        os._exit(9)

    make_folder(target, build)


def test_cache_folder_follows_the_standard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("models") == tmp_path / "tandem" / "models"
    assert cache_folder("models").is_dir()


def test_processes_that_ask_together_build_once(tmp_path: Path):
    target = tmp_path / "made"
    workers = [multiprocessing.get_context("fork").Process(target=make, args=(target,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert sorted(path.name for path in target.iterdir()) == ["one.txt", "two.txt"]
    assert (tmp_path / "builds.txt").read_text() == "x"


def test_a_failed_or_killed_build_leaves_no_entry(tmp_path: Path):
    target = tmp_path / "made"

    def fail(folder: Path) -> None:
        fill(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make_folder(target, fail)
    assert not target.exists()
    killed = multiprocessing.get_context("fork").Process(target=die_half_way, args=(target,))
    killed.start()
    killed.join(30)
    assert killed.exitcode == 9 and not target.exists()
    make_folder(target, fill)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["made"]


def test_a_cache_that_cannot_be_made_is_said_with_the_variable_that_moves_it(monkeypatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="file/tandem") as raised:
        cache_folder("models")
    assert "XDG_CACHE_HOME" in raised.value.hint
