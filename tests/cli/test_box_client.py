"""The client of the commands: where it finds its server, and what errors become."""

import json

import pytest

from tandem.cli.box_client import BoxClient, server_file
from tandem.core.errors import ConfigError, SandboxError


def test_no_server_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no sandbox server") as caught:
        BoxClient()
    assert "tandem sandbox serve" in caught.value.hint


def test_the_note_of_the_server_and_flags_over_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server_file().write_text(json.dumps({"url": "http://127.0.0.1:9/", "key": "k"}))
    assert BoxClient().url == "http://127.0.0.1:9"
    assert BoxClient("http://127.0.0.1:8").url == "http://127.0.0.1:8"
    with BoxClient() as client, pytest.raises(SandboxError, match="does not answer"):
        client.ask("GET", "/v2/sandboxes")
