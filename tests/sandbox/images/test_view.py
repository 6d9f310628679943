from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Layer
from tandem.sandbox.images.view import View


@pytest.fixture
def layers(tmp_path: Path) -> list[Layer]:
    """Lower and upper, as overlayfs would stack them; the upper one first."""
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for path in ("usr/lib/deep", "gone", "opaque", "replaced"):
        (lower / path).mkdir(parents=True)
    for path in ("usr/lib/a", "gone/x", "opaque/old", "replaced/x", "file"):
        (lower / path).write_text(f"lower {path}")
    (lower / "lib").symlink_to("usr/lib")
    (lower / "abs").symlink_to("/usr/../usr/lib")
    (lower / "out").symlink_to("../../../../etc")
    (lower / "loop").symlink_to("loop")
    (upper / "usr/lib").mkdir(parents=True)
    (upper / "usr/lib/a").write_text("upper")
    (upper / "usr/lib/b").write_text("upper b")
    (upper / "opaque").mkdir()
    try:
        os.mknod(upper / "gone", 0o020000, 0)
        os.setxattr(upper / "opaque", "user.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"no whiteouts here: {error}")
    (upper / "replaced").write_text("now a file")
    return [Layer(path=upper), Layer(path=lower)]


def test_upper_layers_hide_lower_ones(layers):
    with View(layers, host_base=False) as view:
        assert view.names("") == ["abs", "file", "lib", "loop", "opaque", "out", "replaced", "usr"]
        assert view.names("usr/lib") == ["a", "b", "deep"] and view.names("opaque") == []
        assert view.find("gone") is None and view.find("gone/x") is None and view.find("replaced/x") is None
        assert view.find("opaque/old") is None
        for path, content in (("usr/lib/a", b"upper"), ("file", b"lower file"), ("replaced", b"now a file")):
            found = view.find(path)
            assert found is not None and view.read(found) == content


def test_links_stay_inside(layers):
    with View(layers, host_base=False) as view:
        assert view.resolve("/lib/a") == "usr/lib/a" == view.resolve("abs/./a")
        assert view.resolve("out/passwd") == "etc/passwd" and view.find("etc/passwd") is None
        assert view.resolve("lib") == "usr/lib" and view.resolve("lib", follow_last=False) == "lib"
        assert view.resolve("../../new/../x/y") == "x/y"
        with pytest.raises(SandboxError, match="never end"):
            view.resolve("loop/x")


def test_of_the_host_only_its_system_is_shown():
    with View([], host_base=True) as view:
        assert set(view.names("")) <= {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"}
        assert view.find("etc") is None and view.find("etc/passwd") is None
        found = view.find(view.resolve("bin/sh"))
        assert found is not None


def test_a_closed_view_holds_nothing(layers):
    before = len(os.listdir("/proc/self/fd"))
    with View(layers, host_base=True):
        pass
    with pytest.raises(SandboxError, match="cannot be read"):
        View([layers[0], Layer(path=Path("/no/such"))], host_base=False)
    assert len(os.listdir("/proc/self/fd")) == before
