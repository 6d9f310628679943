from __future__ import annotations

import sys
from pathlib import Path

from tandem.sandbox.backends import template
from tandem.sandbox.backends.template import host_template


def test_only_system_folders_of_the_host_are_shown() -> None:
    shown = [step.argument.decode() for step in host_template().steps if step.kind == "b"]
    assert "/usr" in shown
    system = ("/usr", "/etc/", "/bin", "/sbin", "/lib", "/var/lib/", sys.base_prefix)
    assert all(path.startswith(system) for path in shown)
    private = ("shadow", "passwd", "group", "hosts", "resolv.conf", "sudoers", "ssh", "ssl/private")
    assert not [path for path in shown if path in {f"/etc/{name}" for name in private}]


def test_parents_come_before_children() -> None:
    made = {"."}
    for step in host_template().steps:
        assert str(Path(step.path).parent) in made or Path(step.path).parts[0] == "proc"
        made.add(step.path)


def test_without_a_system_python_our_own_is_shown(monkeypatch) -> None:
    monkeypatch.setattr(template.shutil, "which", lambda name, path=None: None)
    found = host_template()
    assert found.python == f"{Path(sys.base_prefix).resolve()}/bin/python3"
    assert found.environment["PATH"].startswith(f"{Path(sys.base_prefix).resolve()}/bin:")
    assert str(Path(sys.base_prefix).resolve()) in [step.argument.decode() for step in found.steps if step.kind == "b"]
