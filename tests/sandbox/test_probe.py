from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tandem.sandbox.probe import probe


def test_a_capable_machine_is_shown_as_such() -> None:
    features = {feature.name: feature for feature in asyncio.run(probe())}
    assert features["a box"].ok and "python3" in features["a box"].detail
    assert all(feature.ok for feature in features.values() if feature.needed)
    assert all(feature.remedy for feature in features.values() if not feature.ok)
    assert not [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"-{os.getpid()}-" in path and "tandem-" in path]


def test_what_is_missing_comes_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    features = {feature.name: feature for feature in asyncio.run(probe(cache=tmp_path))}
    assert not features["native program"].ok and "gcc" in features["native program"].remedy
    assert not features["a box"].ok and "gcc" in features["a box"].remedy
