"""A sandbox server: the manager behind the E2B-compatible face.

Owns: the joining of manager, templates, access and web application for the life of the command, and the note (address
and key, readable by this user only) by which the other commands find it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import ASGIApp

from tandem.app.supervise import FAILED, FINISHED, supervise
from tandem.config.sections.sandbox import NetworkSection, SandboxSection
from tandem.core.boxes import NetworkPolicy
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox.backend import SandboxBackend
from tandem.sandbox.factory import make_backend
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.manager import SandboxManager, spec_of
from tandem.serve.e2b.access import Access, kept_secret, make_key
from tandem.serve.e2b.app import Face, make_app
from tandem.serve.e2b.boxes import Boxes
from tandem.serve.e2b.building import Builder
from tandem.serve.e2b.template_routes import TemplateRoutes
from tandem.serve.e2b.templates import TemplateList
from tandem.serve.server import serve_forever

# Names that clients use when their user chose none: they give the server's own template.
DEFAULT_NAMES = ("base", "code-interpreter-v1", "code-interpreter", "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """``state``: the folder of what outlives the server. ``keys`` empty: one is made. ``note`` None: no note."""

    state: Path
    host: str = "127.0.0.1"
    port: int = 3000
    domain: str = ""
    keys: tuple[str, ...] = ()
    internet: bool = False
    note: Path | None = None
    images: Path | None = None  # None: this user's


def serve_sandboxes(section: SandboxSection, options: ServerOptions) -> int:
    """Serve until a signal; returns the exit code. Boxes end with the server, or wait for the next one on the same
    state folder where the backend can keep them.

    Raises:
        TandemError: the state folder is in use or broken, the machine makes no boxes.
    """
    code, detail = supervise(
        lambda: _serve(section, options),
        lambda: None,
        stopping="boxes are ended or handed over",
        interrupted=FINISHED,  # a server is stopped by a signal: that is its good end
    )
    if code == FAILED:
        print(f"error: {detail}", file=sys.stderr)
    return code


@asynccontextmanager
async def sandbox_app(
    section: SandboxSection, options: ServerOptions, keys: tuple[str, ...], *, backend: SandboxBackend | None = None
) -> AsyncIterator[ASGIApp]:
    """The application, for as long as the context lasts."""
    network = section.network.model_copy(update={"internet": section.network.internet or options.internet})
    section = section.model_copy(update={"network": network})
    options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = ImageLibrary(options.images)
    backend = backend or make_backend(section, options.state)  # its boxes may outlive a killed server
    manager = SandboxManager(
        section, NowhereSink(), backend=backend, state=options.state, templates=library,
        bound=lambda policy: _bounded(policy, network),
    )
    try:
        await manager.open()
        listed = TemplateList(options.state / "templates")
        spec = spec_of(section)
        access = Access(keys, kept_secret(options.state / "secret"))
        aliases = {name: spec.template for name in DEFAULT_NAMES}
        boxes = Boxes(manager, spec, aliases=aliases, may_internet=network.internet, templates=listed,
                      library=library)  # fmt: skip
        builder = Builder(manager, listed, library, spec, aliases)
        try:
            yield make_app(Face(boxes=boxes, access=access, domain=options.domain,
                                templates=TemplateRoutes(listed, library, builder, boxes, access)))  # fmt: skip
        finally:
            await builder.close()
            await boxes.close()
    finally:
        await manager.leave()


def _bounded(policy: NetworkPolicy, section: NetworkSection) -> NetworkPolicy:
    """What a client asks for, within what the operator of the server gives."""
    return replace(
        policy, internet=policy.internet and section.internet, private=section.allow, never=section.deny,
        connections=section.connections, total_bytes=section.total_mb * 2**20,
    )


async def _serve(section: SandboxSection, options: ServerOptions) -> None:
    keys = options.keys or (make_key(),)
    async with sandbox_app(section, options, keys) as app:
        try:
            await serve_forever(app, host=options.host, port=options.port,
                                on_ready=lambda url: _tell(url, keys, options))  # fmt: skip
        finally:
            if options.note is not None:
                with suppress(FileNotFoundError):
                    options.note.unlink()


def _tell(url: str, keys: tuple[str, ...], options: ServerOptions) -> None:
    key, note, access = keys[0], options.note, Access(keys, kept_secret(options.state / "secret"))
    if note is not None:
        scratch = note.with_name(f".{note.name}")
        scratch.unlink(missing_ok=True)
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"url": url, "key": key, "pid": os.getpid()}, file)
        os.replace(scratch, note)
    print(
        f"serving sandboxes at {url} (Ctrl-C ends it); try:\n"
        f"  tandem sandbox start\n"
        f"with E2B's SDK:\n"
        f"  export E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={key}\n"
        f"in the audit log: {', '.join(access.name_of(one) for one in keys)}",
        flush=True,
    )
