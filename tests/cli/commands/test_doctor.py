"""``tandem doctor``: a line for each fact, a remedy where one is needed, and the exit code."""

import pytest

from tandem.cli.main import run
from tandem.sandbox.probe import Feature


@pytest.mark.parametrize(("ok", "code", "mark"), [(True, 0, "ok "), (None, 0, "-- "), (False, 1, "NO ")])
def test_marks_remedies_and_exit_code(capsys, monkeypatch, ok, code, mark):
    fact = Feature(feature="a box", ok=ok, detail="detail", remedy="do this")
    monkeypatch.setattr("tandem.app.doctor.facts", lambda: [fact])
    assert run(["doctor"]) == code
    out = capsys.readouterr().out
    assert out.startswith(f"{mark} a box  detail") and ("remedy: do this" in out) == (not ok)
