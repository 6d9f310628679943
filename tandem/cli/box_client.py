"""A small client of a sandbox server, for the commands of ``tandem sandbox``.

Owns: where the server is (``server.json`` of the last one started by this user, or the flags), its errors as ours, and
the streams of commands. Refuses: retries of anything that is not safe to do twice.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tandem.core.cache import cache_folder
from tandem.core.errors import ConfigError, SandboxError, SandboxGone, SandboxTimeout

SERVER_FILE = "server.json"
ENVD_PORT = 49983
TIMEOUT_S = 60.0
Message = dict[str, Any]


def server_file() -> Path:
    return cache_folder("sandboxes") / SERVER_FILE


class BoxClient:
    """One server. Use it as a context manager."""

    def __init__(self, url: str = "", key: str = "") -> None:
        """Empty words: as the server that was last started here left them.

        Raises:
            ConfigError: no server is known.
        """
        if not url or not key:
            try:
                known = json.loads(server_file().read_text())
            except (OSError, ValueError):
                known = {}
            url, key = url or known.get("url", ""), key or known.get("key", "")
        if not url:
            raise ConfigError("no sandbox server is known", hint="start one: tandem sandbox serve (or give --url)")
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers={"X-API-Key": key, "X-Access-Token": key},
                                  timeout=TIMEOUT_S)  # fmt: skip

    def __enter__(self) -> BoxClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, body: Message | None = None, *, timeout_s: float = TIMEOUT_S,
            **words: Any) -> Any:  # fmt: skip
        """One call of the control plane; its JSON, or None.

        Raises:
            SandboxGone (404), SandboxTimeout (504), SandboxError: with the server's words.
        """
        response = self._send(method, path, json=body, timeout=timeout_s, **words)
        return response.json() if response.content else None

    def all_boxes(self, words: Message | None = None) -> list[Message]:
        found: list[Message] = []
        token = ""
        while True:
            more = (words or {}) | ({"nextToken": token} if token else {})
            response = self._send("GET", "/v2/sandboxes", params=more)
            found += response.json()
            token = response.headers.get("x-next-token", "")
            if not token:
                return found

    def upload(self, sandbox_id: str, path: str, data: bytes, *, user: str = "") -> None:
        self._send("POST", "/files", params=_file_words(path, user), content=data,
                   headers=_to(sandbox_id) | {"Content-Type": "application/octet-stream"})  # fmt: skip

    def download(self, sandbox_id: str, path: str, *, user: str = "") -> bytes:
        return self._send("GET", "/files", params=_file_words(path, user), headers=_to(sandbox_id)).content

    def call(self, sandbox_id: str, method: str, message: Message) -> Message:
        """One unary call of an in-box service, such as ``process.Process/SendInput``."""
        return self._send("POST", f"/{method}", json=message, headers=_to(sandbox_id)).json()

    def stream(
        self, sandbox_id: str, method: str, message: Message, *, timeout_s: float | None, user: str = ""
    ) -> Iterator[Message]:
        """The messages of a streaming call, until its end.

        Raises:
            SandboxTimeout: the time limit passed. SandboxError: it broke off, or failed.
        """
        data = json.dumps(message).encode()
        headers = _to(sandbox_id) | {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        if timeout_s:
            headers["Connect-Timeout-Ms"] = str(int(timeout_s * 1000))
        if user:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        body = b"\0" + len(data).to_bytes(4, "big") + data
        quiet = httpx.Timeout(TIMEOUT_S, read=None)
        try:
            with self._http.stream("POST", f"/{method}", content=body, headers=headers, timeout=quiet) as response:
                if response.status_code >= 300:
                    response.read()
                    _raise(response)
                yield from _messages(response)
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def _send(self, method: str, path: str, **words: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **words)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code >= 300:
            _raise(response)
        return response

    def _lost(self, error: httpx.HTTPError) -> SandboxError:
        return SandboxError(f"the sandbox server at {self.url} does not answer: {type(error).__name__}: {error}",
                            hint="is it running? start one: tandem sandbox serve")  # fmt: skip


def _messages(response: httpx.Response) -> Iterator[Message]:
    held = bytearray()
    for part in response.iter_raw():
        held += part
        while len(held) >= 5 and len(held) >= 5 + (size := int.from_bytes(held[1:5], "big")):
            flags, message = held[0], json.loads(held[5 : 5 + size])
            del held[: 5 + size]
            if flags & 2:
                if error := message.get("error"):
                    kind = SandboxTimeout if error.get("code") == "deadline_exceeded" else SandboxError
                    raise kind(error.get("message", "the call failed"))
                return
            yield message
    raise SandboxGone("the stream broke off before its end", hint="the box or the server went away")


def _raise(response: httpx.Response) -> None:
    try:
        message = str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:300] or f"status {response.status_code}"
    if response.status_code == 401:
        raise ConfigError(message, hint="give the server's key: --key, or start the server as this user")
    kinds = {404: SandboxGone, 502: SandboxGone, 504: SandboxTimeout}
    raise kinds.get(response.status_code, SandboxError)(message)


def _to(sandbox_id: str) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(ENVD_PORT)}


def _file_words(path: str, user: str) -> dict[str, str]:
    return {"path": path} | ({"username": user} if user else {})
