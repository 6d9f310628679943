"""Which box and port a request is for.

Owns: the two ways to name a port of a box: the host name ``PORT-ID.domain`` and the headers ``E2b-Sandbox-Id`` and
``E2b-Sandbox-Port``. Invariant: a request that names a box never reaches the control plane, and the other way round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from tandem.serve.e2b.faults import Fault

ENVD_PORT = 49983
INTERPRETER_PORT = 49999
_HOST = re.compile(r"(\d{1,5})-([A-Za-z0-9][A-Za-z0-9_-]*)\.")


@dataclass(frozen=True, slots=True)
class Target:
    sandbox_id: str
    port: int


def target_of(headers: Headers) -> Target | None:
    """None: the request is for the control plane.

    Raises:
        Fault: a port that is none.
    """
    if named := headers.get("e2b-sandbox-id"):
        return Target(named, _port(headers.get("e2b-sandbox-port", str(ENVD_PORT))))
    if found := _HOST.match(headers.get("host", "")):
        return Target(found[2], _port(found[1]))
    return None


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 65536:
        raise Fault(400, f"no port {text[:20]!r}: 1 to 65535")
    return int(text)
