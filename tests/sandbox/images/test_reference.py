import pytest

from tandem.core.errors import ConfigError
from tandem.sandbox.images.reference import ImageReference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "normal", "host"),
    [
        ("python", "docker.io/library/python:latest", "registry-1.docker.io"),
        ("me/thing:3", "docker.io/me/thing:3", "registry-1.docker.io"),
        ("ghcr.io/a/b/c:x.y-z", "ghcr.io/a/b/c:x.y-z", "ghcr.io"),
        ("localhost:5000/a", "localhost:5000/a:latest", "localhost:5000"),
        (f"python@{DIGEST}", f"docker.io/library/python@{DIGEST}", "registry-1.docker.io"),
        (f"127.0.0.1:1/a:t@{DIGEST}", f"127.0.0.1:1/a:t@{DIGEST}", "127.0.0.1:1"),
    ],
)
def test_names_have_one_normal_form(text, normal, host):
    found = ImageReference.parse(text)
    assert (str(found), found.host) == (normal, host)
    assert ImageReference.parse(normal) == found


@pytest.mark.parametrize("text", ["", "Upper", "a:", "a b", "../a", "a@sha256:12", "ghcr.io/", "a:b:c"])
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ConfigError):
        ImageReference.parse(text)


@pytest.mark.parametrize(
    ("host", "is_ours"), [("localhost", True), ("127.0.0.1:5", True), ("127.0.0.1.evil.org", False)]
)
def test_plain_http_is_for_this_machine(host, is_ours):
    assert ImageReference(registry=host, repository="a").loopback is is_ours
