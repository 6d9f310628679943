"""One port for all: the control plane, the services in boxes, and the ports of boxes.

Owns: which of the three a request is for, and who may pass. Invariant: no request reaches a box without the box's
token (or a signature made of it), the interpreter and envd ports included; ports are open unless their box says no.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from tandem.serve.e2b import proxy, shapes
from tandem.serve.e2b.access import Access, check_expiration
from tandem.serve.e2b.boxes import Boxes, Entry
from tandem.serve.e2b.control import Control
from tandem.serve.e2b.envd import connect, filesystem, processes
from tandem.serve.e2b.envd.interpreter import answer_interpreter
from tandem.serve.e2b.envd.transfer import answer_files
from tandem.serve.e2b.faults import Fault, fault_of, fault_response, json_response, not_running
from tandem.serve.e2b.metrics import Metrics
from tandem.serve.e2b.openapi import document
from tandem.serve.e2b.refusals import Refusals
from tandem.serve.e2b.routing import ENVD_PORT, INTERPRETER_PORT, Target, target_of
from tandem.serve.e2b.template_routes import TemplateRoutes

SERVICES = {"process.Process": processes.service_of, "filesystem.Filesystem": filesystem.service_of}
OWN_PORTS = (ENVD_PORT, INTERPRETER_PORT)  # of every box: we answer there, whatever listens inside
LOOKS = {"GET", "HEAD"}
# Calls into a box that change nothing, and what a command is told while it runs: the audit log has its start.
UNTOLD = {"List", "Connect", "Stat", "ListDir", "GetWatcherEvents", "SendInput", "StreamInput", "CloseStdin", "Update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """What is served, and to whom."""

    boxes: Boxes
    access: Access
    templates: TemplateRoutes
    domain: str = ""  # boxes are reached at PORT-ID.domain; '' : by headers only


def make_app(face: Face) -> ASGIApp:
    """The application. The manager is the caller's to close."""
    control = Control(face.boxes, face.access, face.domain)
    metrics = Metrics(face.boxes)
    refusals = Refusals(face.boxes.note)

    async def openapi(request: Request) -> Response:
        return json_response(document(routes, str(request.base_url)))

    async def health(request: Request) -> Response:
        return json_response({"status": "ok", "boxes": len(face.boxes.records())})

    async def numbers(request: Request) -> Response:
        return Response(await metrics.text(), media_type="text/plain; version=0.0.4")

    routes = [*(_guarded(face, refusals, route) for route in control.routes()),  # the manager notes these
              *(_guarded(face, refusals, route, noted=True) for route in face.templates.routes())]  # fmt: skip
    open_routes = [Route("/openapi.json", openapi), Route("/health", health), Route("/metrics", numbers),
                   *face.templates.open_routes()]  # fmt: skip
    plane = Starlette(
        routes=[*routes, *open_routes],
        exception_handlers={HTTPException: _http_error, Exception: _any_error, Fault: _any_error},
    )
    return _Switch(face, refusals, metrics.counted(plane))


def _guarded(face: Face, refusals: Refusals, route: Route, *, noted: bool = False) -> Route:
    endpoint: Callable[[Request], Awaitable[Response]] = route.endpoint

    async def answer(request: Request) -> Response:
        try:
            face.access.check_key(request.headers)
        except Fault as fault:
            refusals.tell(fault, request.scope)
            return fault_response(fault)
        try:
            if noted and request.method not in LOOKS:
                face.boxes.note(f"{request.method} {route.path}", request.path_params.get("template_id", ""),
                                actor=face.access.actor(request.scope))  # fmt: skip
            return await endpoint(request)
        except Exception as error:  # the boundary to the client: every error becomes a status and a sentence
            return fault_response(fault_of(error))

    answer.__doc__ = endpoint.__doc__
    answer.__name__ = getattr(endpoint, "__name__", "endpoint")
    return Route(route.path, answer, methods=list(route.methods or ["GET"]))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return fault_response(Fault(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _any_error(request: Request, error: Exception) -> Response:
    return fault_response(fault_of(error))


class _Switch:
    """The outermost application."""

    def __init__(self, face: Face, refusals: Refusals, plane: ASGIApp) -> None:
        self._face = face
        self._refusals = refusals
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            target = target_of(headers) or self._signed_target(scope)
            if scope["type"] == "websocket" and (target is None or target.port in OWN_PORTS):
                raise Fault(404, "no WebSocket here: name a box and a port of a server in it")
        except Exception as error:  # the boundary to the client
            await self._refuse(fault_of(error), scope, receive, send)
            return
        if target is None:
            await self._plane(scope, receive, send)
            return
        try:
            entry = self._admit(target, scope, headers)
            self._note(entry, target, scope)
        except Exception as error:  # the boundary to the client
            await self._refuse(fault_of(error), scope, receive, send)
            return
        if target.port not in OWN_PORTS:
            scope = dict(scope, headers=self._face.access.without_keys(scope["headers"]))
        if scope["type"] == "websocket":
            await proxy.pass_websocket(entry, target.port, scope, receive, send)
        elif target.port == ENVD_PORT:
            await self._envd(entry, scope, receive, send)
        elif target.port == INTERPRETER_PORT:
            await _plain(answer_interpreter(entry, Request(scope, receive)), scope, receive, send)
        else:
            await proxy.pass_http(entry, target.port, scope, receive, send)

    def _admit(self, target: Target, scope: Scope, headers: Headers) -> Entry:
        """Raises: Fault (no token, no such box)."""
        access, sandbox_id = self._face.access, target.sandbox_id
        if target.port == INTERPRETER_PORT:
            access.check_interpreter(sandbox_id, headers)
        elif target.port != ENVD_PORT:
            if not shapes.is_public(self._known(sandbox_id)):
                access.check_traffic(sandbox_id, target.port, headers)
        elif scope["path"] == "/files" and "signature" in _query(scope):
            self._check_signature(sandbox_id, scope)
        elif scope["path"] != "/health":
            access.check_box(sandbox_id, headers)
        return self._face.boxes.entry(sandbox_id)

    def _note(self, entry: Entry, target: Target, scope: Scope) -> None:
        """What is done in a box through its services. What passes to its other ports is not ours."""
        if scope["type"] != "http" or target.port not in OWN_PORTS or scope["method"] in LOOKS:
            return
        what = scope["path"].strip("/")
        if what.partition("/")[2] not in UNTOLD and what != "init":
            self._face.boxes.note(f"{scope['method']} {what}", entry.id, actor=self._face.access.actor(scope),
                                  path=_query(scope).get("path", ""))  # fmt: skip

    def _known(self, sandbox_id: str):
        try:
            return self._face.boxes.record(sandbox_id)
        except Fault:
            raise not_running(sandbox_id) from None

    def _signed_target(self, scope: Scope) -> Target | None:
        """A signed link that names no box (clients that were given one address for all boxes make such): the box whose
        token made the signature."""
        if scope["type"] != "http" or scope["path"] != "/files":
            return None
        if not _query(scope).get("signature"):
            raise Fault(404, "/files of which box? name it by header or host, or sign the link")
        for record in self._face.boxes.records():
            if self._signed(record.id, scope):
                return Target(record.id, ENVD_PORT)
        raise Fault(401, "no box's token made this signature")

    def _check_signature(self, sandbox_id: str, scope: Scope) -> None:
        if not self._signed(sandbox_id, scope):
            raise Fault(401, f"the signature is not that of sandbox {sandbox_id} for this path and operation")
        check_expiration(_query(scope).get("signature_expiration", ""))

    def _signed(self, sandbox_id: str, scope: Scope) -> bool:
        query = _query(scope)
        operation = "read" if scope["method"] in ("GET", "HEAD") else "write"
        return self._face.access.signed(
            sandbox_id, query["signature"], path=query.get("path", ""), operation=operation,
            user=query.get("username", ""), expiration=query.get("signature_expiration", ""),
        )  # fmt: skip

    async def _envd(self, entry: Entry, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            user = _user(request)
        except Fault as fault:
            await fault_response(fault)(scope, receive, send)
            return
        service, _, method = scope["path"].strip("/").partition("/")
        if service in SERVICES:
            await connect.answer(SERVICES[service](entry), method, request, user, send)
            return
        await _plain(self._small(entry, request, user), scope, receive, send)

    async def _small(self, entry: Entry, request: Request, user: str) -> Response:
        match request.method, request.url.path:
            case _, "/files":
                return await answer_files(entry, request, user)
            case ("GET" | "HEAD"), "/health":
                return Response(status_code=204)
            case "GET", "/envs":
                return json_response(entry.session.spec.environment)
            case "POST", "/init":  # what a hoster tells its agent; ours knows all that from its birth
                return Response(status_code=204)
            case "GET", "/metrics":
                cost, limits = await self._face.boxes.usage(entry.id), entry.session.spec.limits
                told = {"cpu_used_pct": cost.cpu_pct, "mem_used": cost.memory_bytes, "disk_used": cost.disk_bytes}
                return json_response(
                    {"cpu_count": max(1, round(limits.cpus)), "mem_total": limits.memory_bytes,
                     "disk_total": limits.disk_bytes}
                    | {key: value for key, value in told.items() if value is not None}
                )  # fmt: skip
            case method, path:
                raise Fault(404, f"{method} {path}: no such thing in a box")

    async def _refuse(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        self._refusals.tell(fault, scope)
        if scope["type"] == "websocket":
            await proxy.refuse_websocket(WebSocket(scope, receive, send), fault)
        else:
            await fault_response(fault)(scope, receive, send)


async def _plain(work: Awaitable[Response], scope: Scope, receive: Receive, send: Send) -> None:
    try:
        response = await work
    except Exception as error:  # the boundary to the client
        response = fault_response(fault_of(error))
    await response(scope, receive, send)


def _query(scope: Scope) -> QueryParams:
    return QueryParams(scope["query_string"])


def _user(request: Request) -> str:
    """Whom a client wants to be, by Basic authorization or ``username``: the box knows whether there is such a user. A
    signed link is for the user that it names."""
    name = request.query_params.get("username", "")
    given = "" if "signature" in request.query_params else request.headers.get("authorization", "")
    if given.startswith("Basic "):
        try:
            name = base64.b64decode(given[6:], validate=True).decode().partition(":")[0]
        except (binascii.Error, UnicodeDecodeError):
            raise Fault(400, "the Authorization header is no Basic one") from None
    if "\0" in name or "\n" in name or len(name) > 80:
        raise Fault(401, f"no user {name[:40]!r} in a box")
    return name or "agent"
