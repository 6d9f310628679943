"""Converted models go into a cache of the test session's own, and the reference library does not draw."""

from __future__ import annotations

import os

import pytest
from transformers.utils import logging

USER_CACHE = os.environ.get("XDG_CACHE_HOME", "")


@pytest.fixture
def user_cache(monkeypatch: pytest.MonkeyPatch):
    """The user's real cache, where the converted SmolLM2 stays from one test run to the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", USER_CACHE)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
