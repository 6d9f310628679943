"""The control plane: boxes by HTTP, as both eras of E2B's SDK ask for them.

Owns: its routes and the translation of each into a verb of the manager. Releases up to 2.50 create with ``POST
/sandboxes`` and connect with ``/sandboxes/ID/connect``; later ones use ``/v2/sandboxes``, with other defaults.
Refuses: anything without an API key.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.sandbox.records import BoxRecord, PauseMode
from tandem.serve.e2b import shapes
from tandem.serve.e2b.access import Access
from tandem.serve.e2b.boxes import Boxes
from tandem.serve.e2b.envd.interpreter import warm_up
from tandem.serve.e2b.faults import Fault, fault_of, json_response

MAX_BODY_BYTES = 2**20
MAX_TIMEOUT_S = 86_400
MAX_PAGE = 100
KEPT_KEYS = 10_000  # idempotency keys remembered
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Control:
    """The endpoints over one manager."""

    boxes: Boxes
    access: Access
    domain: str
    _answered: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)

    def routes(self) -> list[Route]:
        one = "/sandboxes/{sandbox_id}"
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/sandboxes", self.create),
            ("POST", "/v2/sandboxes", self.create),
            ("GET", "/sandboxes", self.list_running),
            ("GET", "/v2/sandboxes", self.list_all),
            ("GET", "/sandboxes/metrics", self.all_metrics),
            ("GET", one, self.detail),
            ("DELETE", one, self.kill),
            ("POST", f"{one}/connect", self.connect),
            ("POST", f"/v2{one}/connect", self.connect),
            ("POST", f"{one}/resume", self.resume),
            ("POST", f"{one}/pause", self.pause),
            ("POST", f"{one}/fork", self.fork),
            ("POST", f"{one}/timeout", self.set_timeout),
            ("POST", f"{one}/refreshes", self.refresh),
            ("PUT", f"{one}/network", self.set_network),
            ("GET", f"{one}/metrics", self.metrics),
            ("GET", f"{one}/ports/{{port}}", self.port),
            ("GET", f"{one}/logs", self.logs),
            ("GET", f"/v2{one}/logs", self.logs),
            ("POST", f"{one}/snapshots", self.snapshot),
            ("GET", "/snapshots", self.snapshots),
        ]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]

    # ---- life
    async def create(self, request: Request) -> Response:
        key = request.headers.get("idempotency-key", "")
        if key and key in self._answered:
            return json_response(self._answered[key], 201)
        asked = shapes.read(await body(request), shapes.NewSandbox)
        if "/v2/" in request.url.path and b'"timeout"' not in await request.body():
            asked = msgspec.structs.replace(asked, timeout=300)
        if asked.volume_mounts or asked.mcp or asked.iam:
            raise Fault(400, "volumeMounts, mcp and iam are not supported here")
        record = await self.boxes.create(
            asked, timeout_s=_timeout(asked.timeout), actor=self._by(request), warm_up=warm_up
        )
        made = self._sandbox(record)
        if key:
            self._answered[key] = made
            while len(self._answered) > KEPT_KEYS:
                self._answered.popitem(last=False)
        return json_response(made, 201)

    async def connect(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Connect)
        if asked.memory is False:
            raise Fault(400, "memory: false: a paused box comes back with its processes here")
        timeout_s = _timeout(300 if asked.timeout is None else asked.timeout)
        record, resumed = await self.boxes.connect(_id(request), timeout_s=timeout_s, actor=self._by(request))
        return json_response(self._sandbox(record), 201 if resumed else 200)

    async def resume(self, request: Request) -> Response:
        """Of the first clients: 409 where it runs already."""
        asked = shapes.read(await body(request), shapes.Connect)
        timeout_s = _timeout(asked.timeout or 15)
        record, resumed = await self.boxes.connect(_id(request), timeout_s=timeout_s, actor=self._by(request))
        if not resumed:
            raise Fault(409, f"sandbox {record.id} is running already")
        return json_response(self._sandbox(record), 201)

    async def kill(self, request: Request) -> Response:
        await self.boxes.kill(_id(request), actor=self._by(request))
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Pause)
        if asked.cold and not asked.memory:
            raise Fault(400, "cold: not with memory: false, which keeps no memory to give back")
        mode = PauseMode.COLD if asked.cold else PauseMode.WARM if asked.memory else PauseMode.FILES
        done = await self.boxes.pause(_id(request), mode=mode, actor=self._by(request))
        if not done and not asked.cold:  # a paused box gives its memory back all the same
            raise Fault(409, f"sandbox {_id(request)} is paused already")
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Fork)
        if not 1 <= asked.count <= 100:
            raise Fault(400, f"count: {asked.count} is not between 1 and 100")
        timeout_s = _timeout(15 if asked.timeout is None else asked.timeout)
        children = await self.boxes.fork(
            _id(request), asked.count, timeout_s=timeout_s, live=asked.live, actor=self._by(request)
        )
        return json_response([self._child(child) for child in children], 201)

    async def set_timeout(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Timeout)
        seconds = float(_timeout(asked.timeout, least=0))
        self.boxes.set_timeout(_id(request), seconds, actor=self._by(request))
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Refresh)
        self.boxes.refresh(_id(request), float(_timeout(asked.duration or 60)), actor=self._by(request))
        return Response(status_code=204)

    async def set_network(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Network)
        await self.boxes.set_network(_id(request), asked, actor=self._by(request))
        return Response(status_code=204)

    # ---- looking
    async def port(self, request: Request) -> Response:
        """the token of one port of a box whose ports are not public"""
        record, given = self.boxes.record(_id(request)), request.path_params["port"]
        if not given.isdecimal() or len(given) > 5 or not 1 <= int(given) <= 65535:
            raise Fault(400, f"port: {given[:20]!r} is not between 1 and 65535")
        token = self.access.port_token(record.id, int(given))
        return json_response({"sandboxID": record.id, "port": int(given), "trafficAccessToken": token})

    async def detail(self, request: Request) -> Response:
        record = self.boxes.record(_id(request))
        shown = shapes.detailed(record, token=self.access.box_token(record.id)) | {"domain": self.domain or None}
        return json_response(shown)

    async def list_running(self, request: Request) -> Response:
        found = self._matching(request, {"running"})
        return json_response([shapes.listed(record) for record in found])

    async def list_all(self, request: Request) -> Response:
        states = {state for text in request.query_params.getlist("state") for state in text.split(",") if state}
        found = self._matching(request, states or {"running", "paused"})
        if request.query_params.get("order", "desc") == "desc":
            found.reverse()
        shown, token = page(found, request, lambda record: record.id)
        headers = {"x-total-running": str(sum(shapes.shown_state(one.state) == "running" for one in found))}
        headers |= {"x-next-token": token} if token else {}
        return json_response([shapes.listed(record) for record in shown], headers=headers)

    def _matching(self, request: Request, states: set[str]) -> list[BoxRecord]:
        wanted = metadata_filter(request.query_params.get("metadata", ""))
        template = request.query_params.get("template", "")
        found = [
            record for record in self.boxes.records()
            if shapes.shown_state(record.state) in states
            and all(record.metadata.get(key) == value for key, value in wanted.items())
            and (not template or template in (record.spec.template, record.metadata.get(shapes.ALIAS)))
        ]  # fmt: skip
        return sorted(found, key=lambda record: (record.created_at, record.id))

    async def metrics(self, request: Request) -> Response:
        record = self.boxes.record(_id(request))
        if shapes.shown_state(record.state) == "paused":
            return json_response([])
        told = await self._metric(record)
        return json_response([told] if told else [])

    async def all_metrics(self, request: Request) -> Response:
        ids = [one for one in request.query_params.get("sandbox_ids", "").split(",") if one]
        known = {record.id: record for record in self.boxes.records()}
        shown = {one: await self._metric(known[one]) for one in ids[:MAX_PAGE] if one in known}
        return json_response({"sandboxes": {one: told for one, told in shown.items() if told}})

    async def _metric(self, record: BoxRecord) -> dict[str, Any]:
        """Empty where this machine does not tell all of it: clients know no gaps, and absence is not zero."""
        cost, limits, now = await self.boxes.usage(record.id), record.spec.limits, time.time()
        if cost.cpu_pct is None or cost.memory_bytes is None or cost.disk_bytes is None:
            return {}
        return {
            "timestamp": shapes.stamp(now), "timestampUnix": int(now), "cpuCount": max(1, round(limits.cpus)),
            "cpuUsedPct": cost.cpu_pct, "memUsed": cost.memory_bytes, "memTotal": limits.memory_bytes, "memCache": 0,
            "diskUsed": cost.disk_bytes, "diskTotal": limits.disk_bytes,
        }  # fmt: skip

    async def logs(self, request: Request) -> Response:
        since_ms = number(request, "start", number(request, "cursor", 0))
        limit = number(request, "limit", 1000, most=1000)
        lines = self.boxes.logs(_id(request), since=since_ms / 1000, limit=limit)
        entries = [
            {"timestamp": shapes.stamp(line.time), "message": line.message, "level": line.level, "fields": line.fields}
            for line in lines
        ]
        if request.url.path.startswith("/v2/"):
            return json_response({"logs": entries})
        old = [{"timestamp": entry["timestamp"], "line": entry["message"]} for entry in entries]
        return json_response({"logs": old, "logEntries": entries})

    # ---- snapshots
    async def snapshot(self, request: Request) -> Response:
        asked = shapes.read(await body(request), shapes.Snapshot)
        made = await self.boxes.snapshot(_id(request), name=asked.name, actor=self._by(request))
        return json_response({"snapshotID": made.id, "names": [made.name] if made.name else []}, 201)

    async def snapshots(self, request: Request) -> Response:
        sandbox_id, name = request.query_params.get("sandboxID", ""), request.query_params.get("name", "")
        found = [one for one in self.boxes.snapshots(sandbox_id) if not name or one.name == name]
        shown, token = page(found, request, lambda one: one.id)
        listed = [{"snapshotID": one.id, "names": [one.name] if one.name else []} for one in shown]
        return json_response(listed, headers={"x-next-token": token} if token else None)

    # ---- shapes
    def _by(self, request: Request) -> str:
        return self.access.actor(request.scope)

    def _sandbox(self, record: BoxRecord) -> dict[str, Any]:
        return {
            "templateID": record.spec.template,
            "alias": record.metadata.get(shapes.ALIAS, record.spec.template),
            "sandboxID": record.id,
            "clientID": shapes.CLIENT_ID,
            "envdVersion": shapes.ENVD_VERSION,
            "envdAccessToken": self.access.box_token(record.id),
            "trafficAccessToken": self.access.traffic_token(record.id),
            "domain": self.domain or None,
        }

    def _child(self, child: BoxRecord | Exception) -> dict[str, Any]:
        if isinstance(child, Exception):
            fault = fault_of(child)
            return {"error": {"code": fault.status, "message": fault.message}}
        return {"sandbox": self._sandbox(child)}


async def body(request: Request) -> bytes:
    """Raises: Fault 413."""
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise Fault(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    data = await request.body()
    if len(data) > MAX_BODY_BYTES:
        raise Fault(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return data


def page(found: list[Any], request: Request, name: Callable[[Any], str]) -> tuple[list[Any], str]:
    """A page and the token that asks for the next one: the name of its last item, so that what comes and goes between
    two pages neither repeats nor hides the rest."""
    token, limit = request.query_params.get("nextToken", ""), number(request, "limit", MAX_PAGE, most=MAX_PAGE)
    first = 0
    if token:
        try:
            last, place = base64.urlsafe_b64decode(token).decode().rsplit(" ", 1)
            names = [name(one) for one in found]
            first = names.index(last) + 1 if last in names else int(place)
        except (binascii.Error, ValueError) as error:
            raise Fault(400, "nextToken: not one of ours") from error
    shown = found[first : first + limit]
    if first + limit >= len(found) or not shown:
        return shown, ""
    return shown, base64.urlsafe_b64encode(f"{name(shown[-1])} {first + limit}".encode()).decode()


def metadata_filter(text: str) -> dict[str, str]:
    """``key=value&key2=value2``; clients quote keys and values once more."""
    return {unquote(key): unquote(value) for key, value in parse_qsl(text, keep_blank_values=True)}


def number(request: Request, field_name: str, default: int, *, most: int = 2**53) -> int:
    text = request.query_params.get(field_name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise Fault(400, f"{field_name}: {text[:30]!r} is no number")
    return min(int(text), most)


def _id(request: Request) -> str:
    return request.path_params["sandbox_id"]


def _timeout(seconds: int, *, least: int = 1) -> int:
    if not least <= seconds <= MAX_TIMEOUT_S:
        raise Fault(400, f"timeout: {seconds} is not between {least} and {MAX_TIMEOUT_S} seconds")
    return seconds

