"""Templates by HTTP: requested, their files uploaded, built, tagged, found by name.

Owns: the list of templates, their builds and tags, and the uploaded archives, in one folder where there is one.
Refuses: to run steps (``building``). Invariants: a tag names one finished build; a build that failed is never what a
name gives; the list on disk is whole at every moment.
"""

from __future__ import annotations

import os
import secrets
import time
import uuid
from pathlib import Path

import msgspec

from tandem.core.errors import RecordError
from tandem.serve.e2b.faults import Fault

DEFAULT_TAG = "default"
MAX_LOG_LINES = 10_000
LIST_FILE = "templates.json"


class LogEntry(msgspec.Struct, frozen=True, rename="camel"):
    timestamp: float
    level: str
    message: str
    step: str = ""


class Build(msgspec.Struct, kw_only=True):
    """One build. The library of images knows it as ``name:ID`` once it is ready."""

    id: str
    status: str = "waiting"  # waiting, building, ready, error
    created_at: float = msgspec.field(default_factory=time.time)
    updated_at: float = msgspec.field(default_factory=time.time)
    cpu_count: int = 0
    memory_mb: int = 0
    reason: str = ""
    failed_step: str = ""
    wanted_tags: list[str] = []
    logs: list[LogEntry] = []

    def say(self, message: str, *, level: str = "info", step: str = "") -> None:
        if len(self.logs) < MAX_LOG_LINES:
            self.logs.append(LogEntry(time.time(), level, message, step))


class Template(msgspec.Struct, kw_only=True):
    id: str
    name: str
    created_at: float = msgspec.field(default_factory=time.time)
    public: bool = False
    builds: list[Build] = []
    tags: dict[str, str] = {}  # to build ids
    tagged_at: dict[str, float] = {}
    spawned: int = 0
    last_spawned_at: float = 0.0

    def build(self, build_id: str) -> Build:
        for one in self.builds:
            if one.id == build_id:
                return one
        raise Fault(404, f"template {self.name} has no build {build_id}")

    @property
    def current(self) -> Build:
        """What its bare name gives, or its newest build where none is ready."""
        tagged = self.tags.get(DEFAULT_TAG)
        return self.build(tagged) if tagged else self.builds[-1]


class TemplateList:
    """``folder`` None: it ends with this process."""

    def __init__(self, folder: Path | None) -> None:
        """Raises: RecordError: the list cannot be read."""
        self._folder = folder
        self._known: dict[str, Template] = {}
        if folder is None:
            return
        (folder / "files").mkdir(parents=True, exist_ok=True)
        path = folder / LIST_FILE
        if path.is_file():
            try:
                for one in msgspec.json.decode(path.read_bytes(), type=list[Template]):
                    self._known[one.id] = one
            except msgspec.DecodeError as error:
                raise RecordError(f"{path} cannot be read: {error}") from error
        for one in self._known.values():
            for build in one.builds:
                if build.status in ("waiting", "building"):
                    build.status, build.reason = "error", "the server ended while it was built"

    def all(self) -> list[Template]:
        return list(self._known.values())

    def get(self, name: str) -> Template:
        """By id or name (``name:tag`` too). Raises: Fault 404."""
        bare = name.partition(":")[0]
        for one in self._known.values():
            if one.id == bare or one.name == bare:
                return one
        raise Fault(404, f"no template {name}")

    def find(self, name: str) -> tuple[Template, Build] | None:
        """What ``name``, ``name:tag`` or ``name:buildID`` gives; None: there is no such template.

        Raises:
            Fault 404: there is, but not this build, or it is not ready.
        """
        bare, _, which = name.partition(":")
        try:
            template = self.get(bare)
        except Fault:
            return None
        which = which or DEFAULT_TAG
        build_id = template.tags.get(which, which)
        for build in template.builds:
            if build.id == build_id and build.status == "ready":
                return template, build
        raise Fault(404, f"template {bare} has no finished build {which!r}; tags: {', '.join(template.tags) or 'none'}")

    def request(self, name: str, tags: list[str], *, cpu_count: int, memory_mb: int) -> tuple[Template, Build]:
        """A new build of ``name``, which is made where there is none."""
        bare, _, tag = name.partition(":")
        if not bare or not bare.replace("-", "").replace("_", "").replace("/", "").replace(".", "").isalnum():
            raise Fault(400, f"name: {name[:60]!r}: letters, digits, - _ . and /")
        wanted = list(dict.fromkeys([tag, *tags] if tag else tags)) or [DEFAULT_TAG]
        try:
            template = self.get(bare)
        except Fault:
            template = Template(id=secrets.token_hex(10), name=bare)
            self._known[template.id] = template
        build = Build(id=str(uuid.uuid4()), wanted_tags=wanted, cpu_count=cpu_count, memory_mb=memory_mb)
        template.builds.append(build)
        self.save()
        return template, build

    def finish(self, template: Template, build: Build) -> None:
        """It is ready: its tags name it now. A template's first finished build is its default."""
        build.status = "ready"
        tags = build.wanted_tags if template.tags else [*build.wanted_tags, DEFAULT_TAG]
        self.tag(template, build, tags)

    def tag(self, template: Template, build: Build, tags: list[str]) -> None:
        for tag in dict.fromkeys(tags):
            template.tags[tag] = build.id
            template.tagged_at[tag] = time.time()
        self.save()

    def untag(self, template: Template, tags: list[str]) -> None:
        for tag in tags:
            if template.tags.pop(tag, None) is None:
                raise Fault(404, f"template {template.name} has no tag {tag!r}")
            template.tagged_at.pop(tag, None)
        self.save()

    def remove(self, template: Template) -> None:
        self._known.pop(template.id, None)
        self.save()

    def save(self) -> None:
        if self._folder is None:
            return
        scratch = self._folder / f".{LIST_FILE}"
        with scratch.open("wb") as file:
            file.write(msgspec.json.encode(self.all()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self._folder / LIST_FILE)

    def archive(self, files_hash: str) -> Path:
        """Where the archive of uploaded files with this hash is or belongs."""
        if len(files_hash) != 64 or not all(one in "0123456789abcdef" for one in files_hash):
            raise Fault(400, "the hash of files is 64 hexadecimal digits")
        if self._folder is None:
            raise Fault(501, "this server has no state folder, so it keeps no files for templates")
        return self._folder / "files" / f"{files_hash}.tar"

