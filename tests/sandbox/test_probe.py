from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.sandbox.probe import probe


def test_a_capable_machine_is_shown_as_such() -> None:
    features = {feature.feature: feature for feature in probe()}
    assert "overlays" in features["roots"].detail
    assert bool(features["live fork"].ok) == features["live fork"].detail.startswith("of one")
    assert features["a box"].ok and "python3" in features["a box"].detail
    assert all(feature.ok is not False for feature in features.values())
    assert all(feature.remedy for feature in features.values() if not feature.ok)
    assert not [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"-{os.getpid()}-" in path and "tandem-" in path]


def test_what_is_missing_comes_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    features = {feature.feature: feature for feature in probe(cache=tmp_path)}
    assert not features["native program"].ok and "gcc" in features["native program"].remedy
    assert not features["a box"].ok and "gcc" in features["a box"].remedy
