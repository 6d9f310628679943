"""Which folder is exported, and what is said when there is none."""

from __future__ import annotations

import pytest

from tandem.app.export import export_folder
from tandem.core.errors import ConfigError, RecordError


def test_the_folder_is_copied_whole(tmp_path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    export_folder(run, tmp_path / "some" / "out", adapters=False)
    assert (tmp_path / "some" / "out" / "config.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="exists"):
        export_folder(run, tmp_path / "some" / "out", adapters=False)
    with pytest.raises(RecordError, match="no adapter") as caught:
        export_folder(run, tmp_path / "other", adapters=True)
    assert "hf" in caught.value.hint
    with pytest.raises(RecordError, match="no model"):
        export_folder(tmp_path, tmp_path / "other", adapters=False)
