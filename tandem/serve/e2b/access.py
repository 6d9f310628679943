"""Who may do what: keys of the API, tokens of boxes, signatures of files.

Owns: the secret from which the tokens of every box are made, so that none is stored and none enters a box.
Invariant: comparison takes the same time for every wrong value; without a key nothing of the control plane answers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from tandem.serve.e2b.faults import Fault


def make_key() -> str:
    """An API key in the form that every release of the SDK takes."""
    return f"e2b_{secrets.token_hex(20)}"


def kept_secret(path: Path) -> bytes:
    """The secret in ``path``, made (readable by its owner only) where there is none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        secret = secrets.token_bytes(32)
        file.write(secret)
    return secret


class Access:
    """``keys`` open the control plane; ``secret`` makes the tokens of boxes."""

    def __init__(self, keys: Iterable[str], secret: bytes) -> None:
        self._keys = [key.encode() for key in keys]
        self._secret = secret

    def check_key(self, headers: Headers) -> None:
        """Raises: Fault 401."""
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not _among(given, self._keys):
            raise Fault(401, "no valid API key: send it as X-API-Key")

    def without_keys(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """For code in a box: a client that sends its API key to a port of a box does not give it away."""
        return [
            (name, value) for name, value in headers
            if name not in (b"x-api-key", b"authorization")
            or not _among(value.decode("latin-1").removeprefix("Bearer "), self._keys)
        ]  # fmt: skip

    def name_of(self, key: str) -> str:
        """What a key is called in logs: the same for the life of the server's secret, and no help in guessing it."""
        return f"key {self._token('name', key)[:8]}"

    def actor(self, scope: Scope) -> str:
        """Who a request is from, for the audit log: what it showed (a key of ours, by its name; else a token or a
        signature) and its client's address. Of a request that was let in."""
        headers = Headers(scope=scope)
        shown = [headers.get("x-api-key"), headers.get("authorization", "").removeprefix("Bearer "),
                 headers.get("x-access-token")]  # fmt: skip
        keys = [key for key in shown if key and _among(key, self._keys)]
        client = scope.get("client")
        return f"{self.name_of(keys[0]) if keys else 'token'} from {client[0] if client else 'nowhere'}"

    def box_token(self, sandbox_id: str) -> str:
        """What opens the services of a box (``envdAccessToken``)."""
        return self._token("box", sandbox_id)

    def traffic_token(self, sandbox_id: str) -> str:
        """What opens the ports of a box whose ports are not public (``trafficAccessToken``)."""
        return self._token("traffic", sandbox_id)

    def port_token(self, sandbox_id: str, port: int) -> str:
        """What opens one port of such a box and no other."""
        return self._token("port", f"{sandbox_id}:{port}")

    def upload_token(self, files_hash: str) -> str:
        """What a link for uploading these files carries."""
        return self._token("upload", files_hash)

    def check_box(self, sandbox_id: str, headers: Headers) -> None:
        """Raises: Fault 401."""
        given = headers.get("x-access-token", "")
        if not _among(given, [self.box_token(sandbox_id).encode(), *self._keys]):
            raise Fault(401, f"no valid access token for sandbox {sandbox_id}: send it as X-Access-Token")

    def check_interpreter(self, sandbox_id: str, headers: Headers) -> None:
        """For the interpreter, whose clients send one of the two tokens with each call. Raises: Fault 401."""
        given = headers.get("x-access-token") or headers.get("e2b-traffic-access-token", "")
        tokens = [self.box_token(sandbox_id).encode(), self.traffic_token(sandbox_id).encode(), *self._keys]
        if not _among(given, tokens):
            raise Fault(401, f"no valid token for the interpreter of sandbox {sandbox_id}: send it as X-Access-Token")

    def check_traffic(self, sandbox_id: str, port: int, headers: Headers) -> None:
        """Raises: Fault 403."""
        given = headers.get("e2b-traffic-access-token", "")
        tokens = (self.traffic_token(sandbox_id), self.port_token(sandbox_id, port))
        if not _among(given, [token.encode() for token in tokens]):
            raise Fault(403, f"ports of sandbox {sandbox_id} are not public: send E2B-Traffic-Access-Token")

    def signature(self, sandbox_id: str, path: str, operation: str, user: str, expiration: str) -> str:
        """What a signed link carries (the SDK's version 1): a digest over path, operation, user, the box's token and
        the end of its life in Unix seconds."""
        parts = [path, operation, user, self.box_token(sandbox_id), *([expiration] if expiration else [])]
        digest = hashlib.sha256(":".join(parts).encode()).digest()
        return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()

    def signed(self, sandbox_id: str, given: str, *, path: str, operation: str, user: str, expiration: str) -> bool:
        """Whether the signature is that of this box's token. It may be out of date all the same."""
        made = self.signature(sandbox_id, path, operation, user, expiration)
        return hmac.compare_digest(made.encode(), given.encode())

    def _token(self, purpose: str, sandbox_id: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{sandbox_id}".encode(), hashlib.sha256).hexdigest()


def check_expiration(expiration: str) -> None:
    """Raises: Fault 401 (out of date), 400 (no number)."""
    if not expiration:
        return
    if not expiration.isdecimal() or len(expiration) > 20:
        raise Fault(400, f"signature_expiration: {expiration[:20]!r} is no time in seconds")
    if int(expiration) < time.time():
        raise Fault(401, "the signature of this link is out of date")


def _among(given: str, known: Iterable[bytes]) -> bool:
    raw = given.encode()
    found = False
    for one in known:
        found |= hmac.compare_digest(raw, one)
    return found
