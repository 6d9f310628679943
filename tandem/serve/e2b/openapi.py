"""The OpenAPI document of the control plane, made from its routes and bodies.

Owns: what each route takes and gives, in words. Invariant: every guarded route is in it: a route without words fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

import tandem
from tandem.serve.e2b import shapes

BODIES: dict[tuple[str, str], type[shapes.Body]] = {
    ("POST", "/sandboxes"): shapes.NewSandbox,
    ("POST", "/v2/sandboxes"): shapes.NewSandbox,
    ("POST", "/sandboxes/{sandbox_id}/connect"): shapes.Connect,
    ("POST", "/v2/sandboxes/{sandbox_id}/connect"): shapes.Connect,
    ("POST", "/sandboxes/{sandbox_id}/resume"): shapes.Connect,
    ("POST", "/sandboxes/{sandbox_id}/pause"): shapes.Pause,
    ("POST", "/sandboxes/{sandbox_id}/fork"): shapes.Fork,
    ("POST", "/sandboxes/{sandbox_id}/timeout"): shapes.Timeout,
    ("POST", "/sandboxes/{sandbox_id}/refreshes"): shapes.Refresh,
    ("PUT", "/sandboxes/{sandbox_id}/network"): shapes.Network,
    ("POST", "/sandboxes/{sandbox_id}/snapshots"): shapes.Snapshot,
}
_ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
}


def document(routes: Sequence[Route], address: str) -> dict[str, Any]:
    """As JSON; ``address`` is where the server was asked."""
    schemas, components = msgspec.json.schema_components(
        set(BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    del schemas
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = _operation(method, route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem sandboxes, E2B-compatible",
            "version": tandem.__version__,
            "description": "Boxes: create, run, pause, snapshot, fork. In-box services answer on the same port when a "
            "request names a box, by the headers E2b-Sandbox-Id and E2b-Sandbox-Port or by the host PORT-ID.domain.",
        },
        "servers": [{"url": address.rstrip("/")}],
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }


def _operation(method: str, route: Route) -> dict[str, Any]:
    name = getattr(route.endpoint, "__name__", "endpoint")
    failure = {"description": "what failed", "content": {"application/json": {"schema": _ref("Error")}}}
    made: dict[str, Any] = {
        "operationId": f"{name}_{'v2' if '/v2/' in route.path else 'v3' if '/v3/' in route.path else 'v1'}",
        "summary": (route.endpoint.__doc__ or name.replace("_", " ")).strip().partition("\n")[0],
        "parameters": [
            {"name": part, "in": "path", "required": True, "schema": {"type": "string"}}
            for part in re.findall(r"{(\w+)", route.path)
        ],
        "responses": {"2XX": {"description": "done"}, "4XX": failure, "5XX": failure},
    }
    if (kind := BODIES.get((method, route.path))) is not None:
        made["requestBody"] = {"content": {"application/json": {"schema": _ref(kind.__name__)}}}
    return made


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
