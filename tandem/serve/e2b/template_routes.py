"""The control plane's part on templates.

Owns: its routes. An archive is uploaded to a link of its own that needs no key: the link carries a token for this hash.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.sandbox.images.library import ImageLibrary
from tandem.serve.e2b import shapes
from tandem.serve.e2b.access import Access
from tandem.serve.e2b.boxes import Boxes
from tandem.serve.e2b.building import Builder, BuildStart
from tandem.serve.e2b.control import Endpoint, body, number, page
from tandem.serve.e2b.faults import Fault, fault_of, fault_response, json_response
from tandem.serve.e2b.templates import LogEntry, Template, TemplateList

MAX_ARCHIVE_BYTES = 2 * 2**30
MAX_ENTRIES = 100  # of a build's log, in one answer


class NewTemplate(shapes.Body, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    alias: str = ""
    tags: list[str] = []
    cpu_count: int = 0
    memory_mb: int = msgspec.field(name="memoryMB", default=0)


class Tags(shapes.Body, frozen=True, kw_only=True, rename="camel"):
    target: str = ""
    name: str = ""
    tags: list[str] = []


class Update(shapes.Body, frozen=True, kw_only=True, rename="camel"):
    public: bool = False


class TemplateRoutes:
    def __init__(
        self, listed: TemplateList, library: ImageLibrary, builder: Builder, boxes: Boxes, access: Access
    ) -> None:
        self._list, self._library, self._builder = listed, library, builder
        self._boxes, self._access = boxes, access

    def routes(self) -> list[Route]:
        """Those that need an API key."""
        one = "/templates/{template_id:path}"
        build = one + "/builds/{build_id}"
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v3/templates", self.request_build),
            ("GET", "/templates/{template_id:path}/files/{files_hash}", self.upload_link),
            ("POST", f"/v2{build}", self.start_build),
            ("GET", f"{build}/status", self.build_status),
            ("GET", f"{build}/logs", self.build_logs),
            ("GET", "/templates/aliases/{template_id:path}", self.alias),
            ("GET", "/templates", self.list_templates),
            ("GET", "/v2/templates", self.list_templates),
            ("POST", "/templates/tags", self.assign_tags),
            ("DELETE", "/templates/tags", self.remove_tags),
            ("GET", f"{one}/tags", self.list_tags),
            ("GET", one, self.template),
            ("DELETE", one, self.delete_template),
            ("PATCH", one, self.update_template),
            ("PATCH", f"/v2{one}", self.update_template),
        ]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]

    def open_routes(self) -> list[Route]:
        return [Route("/uploads/{files_hash}/{token}", self.upload, methods=["PUT"])]

    # ---- builds
    async def request_build(self, request: Request) -> Response:
        asked = shapes.read(await body(request), NewTemplate)
        name = asked.name or asked.alias
        template, build = self._list.request(name, asked.tags, cpu_count=asked.cpu_count, memory_mb=asked.memory_mb)
        return json_response(
            {"templateID": template.id, "buildID": build.id, "public": template.public, "names": [template.name],
             "aliases": [template.name], "tags": build.wanted_tags}, 202,
        )  # fmt: skip

    async def upload_link(self, request: Request) -> Response:
        files_hash = request.path_params["files_hash"]
        present = self._list.archive(files_hash).is_file()
        token = self._access.upload_token(files_hash)
        return json_response({"present": present, "url": f"{request.base_url}uploads/{files_hash}/{token}"}, 201)

    async def upload(self, request: Request) -> Response:
        try:
            files_hash = request.path_params["files_hash"]
            if not secrets.compare_digest(request.path_params["token"], self._access.upload_token(files_hash)):
                raise Fault(401, "this link was not made for these files")
            await _save(request, self._list.archive(files_hash))
        except Exception as error:  # the boundary to the client
            return fault_response(fault_of(error))
        return Response(status_code=200)

    async def start_build(self, request: Request) -> Response:
        template = self._template(request)
        build = template.build(request.path_params["build_id"])
        if build.status != "waiting":
            raise Fault(409, f"build {build.id} was started already")
        self._builder.begin(template, build, shapes.read(await body(request), BuildStart))
        return Response(status_code=202)

    async def build_status(self, request: Request) -> Response:
        template = self._template(request)
        build = template.build(request.path_params["build_id"])
        first = number(request, "logsOffset", 0)
        limit = number(request, "limit", MAX_ENTRIES, most=MAX_ENTRIES)
        told: dict[str, Any] = {
            "templateID": template.id, "buildID": build.id, "status": build.status, "logs": [],
            "logEntries": [_entry(one) for one in build.logs[first : first + limit]],
        }  # fmt: skip
        if build.status == "error":
            told["reason"] = {"message": build.reason} | ({"step": build.failed_step} if build.failed_step else {})
        return json_response(told)

    async def build_logs(self, request: Request) -> Response:
        build = self._template(request).build(request.path_params["build_id"])
        since = number(request, "cursor", 0) / 1000
        limit = number(request, "limit", MAX_ENTRIES, most=1000)
        found = [one for one in build.logs if one.timestamp >= since]
        return json_response({"logs": [_entry(one) for one in found[:limit]]})

    # ---- the list
    async def list_templates(self, request: Request) -> Response:
        found, token = page(self._list.all(), request, lambda one: one.id)
        headers = {"x-next-token": token} if token else None
        return json_response([self._shown(one) for one in found], headers=headers)

    async def template(self, request: Request) -> Response:
        template = self._template(request)
        builds = [
            {"buildID": one.id, "status": one.status, "createdAt": shapes.stamp(one.created_at),
             "updatedAt": shapes.stamp(one.updated_at), "cpuCount": one.cpu_count or 1, "memoryMB": one.memory_mb}
            for one in template.builds
        ]  # fmt: skip
        return json_response(self._shown(template) | {"builds": builds})

    async def alias(self, request: Request) -> Response:
        template = self._template(request)
        return json_response({"templateID": template.id, "public": template.public})

    async def delete_template(self, request: Request) -> Response:
        """A template, or a snapshot: clients delete both here."""
        name = request.path_params["template_id"]
        if await self._boxes.delete_snapshot(name, actor=self._access.actor(request.scope)):
            return Response(status_code=204)
        template = self._template(request)
        self._list.remove(template)
        await asyncio.to_thread(self._library.remove, template.name)
        return Response(status_code=204)

    async def update_template(self, request: Request) -> Response:
        template = self._template(request)
        template.public = shapes.read(await body(request), Update).public
        self._list.save()
        return json_response({"names": [template.name]})

    # ---- tags
    async def assign_tags(self, request: Request) -> Response:
        asked = shapes.read(await body(request), Tags)
        found = self._list.find(asked.target)
        if found is None:
            raise Fault(404, f"no template {asked.target}")
        template, build = found
        names = [f"{template.name}:{tag}" for tag in asked.tags]
        await asyncio.to_thread(self._library.tag, f"{template.name}:{build.id}", *names)
        self._list.tag(template, build, asked.tags)
        return json_response({"tags": asked.tags, "buildID": found[1].id}, 201)

    async def remove_tags(self, request: Request) -> Response:
        asked = shapes.read(await body(request), Tags)
        self._list.untag(self._list.get(asked.name), asked.tags)
        return Response(status_code=204)

    async def list_tags(self, request: Request) -> Response:
        template = self._template(request)
        return json_response([
            {"tag": tag, "buildID": build_id, "createdAt": shapes.stamp(template.tagged_at.get(tag, 0.0))}
            for tag, build_id in template.tags.items()
        ])  # fmt: skip

    def _template(self, request: Request) -> Template:
        return self._list.get(request.path_params["template_id"])

    def _shown(self, template: Template) -> dict[str, Any]:
        """A ``Template``."""
        limits, current, stamp = self._boxes.spec.limits, template.current, shapes.stamp
        return {
            "templateID": template.id, "buildID": current.id,
            "cpuCount": current.cpu_count or max(1, round(limits.cpus)),
            "memoryMB": current.memory_mb or limits.memory_bytes // 2**20,
            "diskSizeMB": limits.disk_bytes // 2**20, "public": template.public,
            "aliases": [template.name], "names": [template.name], "createdAt": stamp(template.created_at),
            "updatedAt": stamp(current.updated_at), "createdBy": None,
            "lastSpawnedAt": stamp(template.last_spawned_at) if template.last_spawned_at else None,
            "spawnCount": template.spawned, "buildCount": len(template.builds),
            "envdVersion": shapes.ENVD_VERSION, "buildStatus": current.status,
        }  # fmt: skip


async def _save(request: Request, target: Path) -> None:
    """The body, whole or not at all."""
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    size = 0
    try:
        with scratch.open("wb") as file:
            async for part in request.stream():
                size += len(part)
                if size > MAX_ARCHIVE_BYTES:
                    raise Fault(413, f"the archive is larger than {MAX_ARCHIVE_BYTES} bytes")
                file.write(part)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def _entry(one: LogEntry) -> dict[str, Any]:
    told = {"timestamp": shapes.stamp(one.timestamp), "level": one.level, "message": one.message}
    return told | ({"step": one.step} if one.step else {})
