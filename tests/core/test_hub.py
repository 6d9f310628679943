"""A repository is fetched over the hub's own protocol, from a hub on loopback, and serves again without it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tandem.core.errors import ConfigError
from tandem.core.hub import fetch_repository, is_repository

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"train.jsonl": b'{"text": "a"}\n', "notes.md": b"not asked for", "weights.bin": b"nor this"}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)  # pyright: ignore
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/api/datasets/some/rows/"):
            body = json.dumps({
                "id": "some/rows", "sha": COMMIT, "private": False, "downloads": 0, "likes": 0, "tags": [],
                "siblings": [{"rfilename": each} for each in FILES],
            }) if "/tree/" not in path else json.dumps(
                [{"type": "file", "path": each, "size": len(FILES[each]), "oid": "0"} for each in FILES]
            )  # fmt: skip
            self.give(200, body.encode())
        elif path.startswith(f"/datasets/some/rows/resolve/{COMMIT}/") and name in FILES:
            self.give(200, FILES[name])
        else:
            self.give(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def give(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "Content-Type": "application/json",
                   "ETag": f'"{hashlib.sha1(body).hexdigest()}"', **(more or {})}  # fmt: skip
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[tuple[str, list[str]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # pyright: ignore
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked  # pyright: ignore
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def test_what_is_asked_for_is_fetched_once(hub) -> None:
    endpoint, asked = hub
    folder = fetch_repository("some/rows", kind="dataset", files=["**.jsonl"], endpoint=endpoint)
    assert [file.name for file in folder.iterdir()] == ["train.jsonl"]
    assert (folder / "train.jsonl").read_bytes() == FILES["train.jsonl"]
    assert COMMIT in str(folder) and not any(path.endswith(("notes.md", "weights.bin")) for path in asked)
    asked.clear()
    assert fetch_repository("some/rows", kind="dataset", files=["**.jsonl"], endpoint=endpoint) == folder
    assert not any("/resolve/" in path for path in asked)


def test_what_the_hub_does_not_have_is_named(hub) -> None:
    with pytest.raises(ConfigError, match="data set no/such is neither") as caught:
        fetch_repository("no/such", kind="dataset", files=["*"], endpoint=hub[0])
    assert "HF_TOKEN" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("Qwen/Qwen3-0.6B", True), ("a/b@main", True), ("tiny", False), ("a/b/c", False), ("./a/b", False),
     ("/a/b", False), ("~/b", False), ("a/", False)],
)  # fmt: skip
def test_names(name, is_one, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_repository(name) == is_one
    if is_one:
        (tmp_path / name).mkdir(parents=True)
        assert not is_repository(name), "what is here is taken from here"
