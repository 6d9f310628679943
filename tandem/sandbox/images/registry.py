"""A client of container registries: manifests, blobs and ranges of blobs.

Owns: tokens, retries until a deadline, resuming a broken stream where it broke, the allow list, and that a name in
plain HTTP is only ever this machine's. Refuses: registries that are not allowed, redirects to plain HTTP elsewhere.
What it returns is checked by its digest: manifests here, blobs by whoever unpacks the stream.

Source: OCI distribution specification 1.1; "Token Authentication Specification" of the distribution project.
"""

from __future__ import annotations

import base64
import fnmatch
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import httpx

from tandem.core.errors import SandboxError, SandboxTimeout, SandboxUnavailable
from tandem.sandbox.images import manifest as documents
from tandem.sandbox.images.manifest import Descriptor, Index, Manifest
from tandem.sandbox.images.reference import ImageReference, is_loopback

ACCEPT = ", ".join((*documents.MANIFESTS, *documents.INDEXES))
RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
PIECE = 1 << 18
MAX_REDIRECTS = 5
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryImage:
    """One image of a registry. Blocking; may be used by several threads at once."""

    def __init__(
        self,
        reference: ImageReference,
        *,
        allow: Sequence[str] = ("*",),
        credentials: Mapping[str, tuple[str, str]] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """``allow``: patterns of registry names (``*.example.org``). ``credentials``: registry to name and password.
        ``timeout_s``: for everything that is asked of it together.

        Raises:
            SandboxUnavailable: the registry is not allowed.
        """
        if not any(fnmatch.fnmatchcase(reference.registry, pattern) for pattern in allow):
            raise SandboxUnavailable(
                f"images from {reference.registry} are not allowed here",
                hint=f"allowed: {', '.join(allow) or 'none'}",
            )
        self.reference = reference
        self.allow = list(allow)
        self.credentials = dict(credentials or {})
        self._base = f"{'http' if reference.loopback else 'https'}://{reference.host}"
        self._user = (credentials or {}).get(reference.registry)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._token = ""
        self._asking = threading.Lock()
        self._client = httpx.Client(timeout=httpx.Timeout(30.0), follow_redirects=False)

    def __enter__(self) -> RegistryImage:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self, platform: str) -> tuple[Manifest, str]:
        """The manifest for a platform, and its digest."""
        what = str(self.reference)
        data, digest = self._document(self.reference.digest or self.reference.tag)
        found = documents.read_manifest(data, what=what)
        if isinstance(found, Index):
            chosen = documents.choose(found, platform, what=what)
            data, digest = self._document(chosen.digest)
            found = documents.read_manifest(data, what=what)
        if isinstance(found, Index):
            raise SandboxError(f"{what}: an index inside an index")
        return found, digest

    def companion(self, suffix: str) -> Manifest | None:
        """The manifest of the same name with more to its tag; None where there is none."""
        try:
            data, _ = self._document(f"{self.reference.tag or 'latest'}{suffix}")
        except _Missing:
            return None
        found = documents.read_manifest(data, what=f"{self.reference}{suffix}")
        return found if isinstance(found, Manifest) else None

    def read(self, blob: Descriptor) -> bytes:
        """A small blob, checked."""
        if blob.size > documents.MAX_BYTES:
            raise SandboxError(f"{self.reference}: {blob.digest} has {blob.size} bytes, too many for its kind")
        data = b"".join(self.stream(blob))
        documents.check_digest(data, blob.digest, what=str(self.reference))
        return data

    def stream(self, blob: Descriptor) -> Iterator[bytes]:
        """A blob's bytes, not yet checked; a broken connection is taken up where it broke."""
        done = 0
        for attempt in self._attempts(f"blob {blob.digest}"):
            headers = {"Range": f"bytes={done}-"} if done else {}
            try:
                with self._get(self._blob_path(blob), headers) as response:
                    skip = done if done and response.status_code == 200 else 0  # it does not know ranges
                    for piece in response.iter_raw(PIECE):
                        if skip >= len(piece):
                            skip -= len(piece)
                            continue
                        piece, skip = piece[skip:], 0
                        done += len(piece)
                        if done > blob.size:
                            raise SandboxError(f"{self.reference}: {blob.digest} is longer than {blob.size} bytes")
                        yield piece
                        self._check_time(f"blob {blob.digest}, {done} of {blob.size} bytes")
            except httpx.TransportError as error:
                attempt.failed(error)
            if done >= blob.size:
                return
        raise AssertionError

    def read_range(self, blob: Descriptor, start: int, length: int) -> bytes:
        """Bytes of a blob.

        Raises:
            SandboxUnavailable: the registry does not give parts of blobs.
        """
        for attempt in self._attempts(f"bytes {start} to {start + length} of {blob.digest}"):
            try:
                with self._get(self._blob_path(blob), {"Range": f"bytes={start}-{start + length - 1}"}) as response:
                    if response.status_code != 206:
                        raise SandboxUnavailable(f"{self.reference.registry} gives no parts of blobs")
                    data = b"".join(response.iter_raw(PIECE))
            except httpx.TransportError as error:
                attempt.failed(error)
                continue
            if len(data) == length:
                return data
            attempt.failed(f"{len(data)} bytes came")
        raise AssertionError

    def _blob_path(self, blob: Descriptor) -> str:
        return f"/v2/{self.reference.repository}/blobs/{blob.digest}"

    def _document(self, name: str) -> tuple[bytes, str]:
        for attempt in self._attempts(f"manifest {name}"):
            try:
                with self._get(f"/v2/{self.reference.repository}/manifests/{name}", {"Accept": ACCEPT}) as response:
                    data = bytearray()
                    for piece in response.iter_raw(PIECE):
                        data += piece
                        if len(data) > documents.MAX_BYTES:
                            raise SandboxError(f"{self.reference}: its manifest is too large")
                    digest = name if ":" in name else response.headers.get("docker-content-digest", "")
            except httpx.TransportError as error:
                attempt.failed(error)
                continue
            if digest:
                documents.check_digest(bytes(data), digest, what=f"the manifest of {self.reference}")
            else:
                digest = f"sha256:{documents.hashlib.sha256(data).hexdigest()}"
            return bytes(data), digest
        raise AssertionError

    def _attempts(self, what: str) -> Iterator[_Attempt]:
        """Tries with growing pauses until the deadline, which ends them with what was last wrong."""
        pause_s = 0.1
        attempt = _Attempt()
        while True:
            attempt.problem = ""
            yield attempt
            if not attempt.problem:
                attempt.problem = "the connection ended early"
            if time.monotonic() + pause_s > self._deadline:
                self._give_up(f"{what}: {attempt.problem}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 5.0)

    def _check_time(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            self._give_up(what)

    def _give_up(self, what: str) -> None:
        raise SandboxTimeout(f"{self.reference} was not there after {self._timeout_s:g} s; still missing: {what}")

    def _get(self, path: str, headers: dict[str, str]) -> _Response:
        """Raises SandboxError for an answer that trying again does not change, TransportError for the rest."""
        url = httpx.URL(self._base + path)
        asked = False
        for _ in range(MAX_REDIRECTS + 2):
            own = url.host == httpx.URL(self._base).host and url.port == httpx.URL(self._base).port
            secret = {"Authorization": self._token} if self._token and own else {}  # never to where a blob is kept
            sent = {**headers, **secret, "Accept-Encoding": "identity"}
            response = self._client.send(self._client.build_request("GET", url, headers=sent), stream=True)
            code = response.status_code
            if code in (200, 206):
                return _Response(response)
            response.read()
            response.close()
            if code == 401 and own and not asked:
                asked = True
                self._authenticate(response.headers.get("www-authenticate", ""))
            elif code in (301, 302, 303, 307, 308) and (place := response.headers.get("location")):
                url = url.join(place)
                self._refuse_plain(url)
            elif code in RETRIED:
                raise httpx.TransportError(f"HTTP {code}")
            else:
                self._refused(code, response.text)
        raise SandboxError(f"{self.reference.registry} sends us from place to place")

    def _refused(self, code: int, text: str) -> None:
        if code in (401, 403):
            raise SandboxUnavailable(
                f"{self.reference.registry} does not let us read {self.reference.repository} (HTTP {code})",
                hint="give a name and password for the registry",
            )
        if code == 404:
            raise _Missing(f"there is no image {self.reference}", hint="check name and tag")
        raise SandboxError(f"{self.reference.registry} answered HTTP {code}: {text[:300]}")

    def _refuse_plain(self, url: httpx.URL) -> None:
        if url.scheme != "https" and not (self.reference.loopback and is_loopback(url.host)):
            raise SandboxError(f"{self.reference.registry} sends us to {url.scheme}://{url.host}, which is not safe")

    def _authenticate(self, challenge: str) -> None:
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._user:
            self._token = _basic(self._user)
            return
        fields = dict(CHALLENGE.findall(rest))
        if scheme.lower() != "bearer" or "realm" not in fields:
            self._refused(401, "")
        url = httpx.URL(fields.pop("realm"))
        self._refuse_plain(url)
        fields.setdefault("scope", f"repository:{self.reference.repository}:pull")
        with self._asking:
            response = self._client.get(
                url, params={key: fields[key] for key in ("service", "scope") if key in fields},
                headers={"Authorization": _basic(self._user)} if self._user else {},
            )
        if response.status_code in RETRIED:
            raise httpx.TransportError(f"HTTP {response.status_code} from {url.host}")
        answer = response.json() if response.status_code == 200 else {}
        token = answer.get("token") or answer.get("access_token")
        if not token:
            self._refused(401, "")
        self._token = f"Bearer {token}"


class _Missing(SandboxError):
    """The registry has no such thing."""


class _Attempt:
    problem = ""

    def failed(self, why: object) -> None:
        self.problem = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)


class _Response:
    """An answer whose body is still to be read; closed with its block."""

    def __init__(self, response: httpx.Response) -> None:
        self.status_code = response.status_code
        self.headers = response.headers
        self.iter_raw = response.iter_raw
        self._response = response

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


def _basic(user: tuple[str, str]) -> str:
    return "Basic " + base64.b64encode(":".join(user).encode()).decode()
