"""Runs that several tests look at: made once, and side by side where they can be."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from app_pieces import Child, deterministic, small
from disturbances import interrupted_again_and_again, killed_again_and_again


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all children are started in."""
    return tmp_path_factory.mktemp("app")


@pytest.fixture(scope="session")
def undisturbed(place: Path) -> dict[str, Child]:
    """Three runs side by side: a small one of the recipe, and a deterministic one twice."""
    runs = place / "runs"
    words = {"finished": small(runs, "finished")}
    words |= {name: deterministic(runs, name) for name in ("uninterrupted", "repeated")}
    children = {name: Child(["train", *each], place) for name, each in words.items()}
    return {name: child.wait() for name, child in children.items()}


@pytest.fixture
def finished(place: Path, undisturbed: dict[str, Child]) -> tuple[Path, Child]:
    """The folder of the finished run, and the process that made it."""
    return place / "runs" / "finished", undisturbed["finished"]


@pytest.fixture
def uninterrupted(place: Path, undisturbed: dict[str, Child]) -> Path:
    """A deterministic run that nobody disturbed."""
    return place / "runs" / "uninterrupted"


@pytest.fixture
def repeated(place: Path, undisturbed: dict[str, Child]) -> Path:
    """The same once more."""
    return place / "runs" / "repeated"


@pytest.fixture(scope="session")
def disturbed(place: Path) -> Iterator[dict[str, Future[list[str]]]]:
    with ThreadPoolExecutor(2) as pool:
        futures = {
            "killed": pool.submit(killed_again_and_again, place),
            "interrupted": pool.submit(interrupted_again_and_again, place),
        }
        wait(futures.values())  # they look at the mounts, and a later test of another process may make one
        yield futures


@pytest.fixture
def killed(disturbed: dict[str, Future[list[str]]]) -> list[str]:
    """A deterministic run was killed ten times and resumed each time; what was going on at each kill."""
    return disturbed["killed"].result()


@pytest.fixture
def interrupted(disturbed: dict[str, Future[list[str]]]) -> list[str]:
    """A run was interrupted five times and resumed each time; how soon it ended."""
    return disturbed["interrupted"].result()
