"""Builds a template: its steps are run in a box, and the box's files become the template.

Owns: what COPY, RUN, ENV, WORKDIR and USER do, and the words of the build's log. Invariant: a build ends ready or with
the step that failed; its box is gone either way.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from tandem.core.boxes import SandboxSpec
from tandem.sandbox.backend import HOME, Root, Start
from tandem.sandbox.manager import SandboxManager
from tandem.sandbox.records import Life
from tandem.sandbox.session import Session
from tandem.serve.e2b.faults import fault_of
from tandem.serve.e2b.shapes import Body
from tandem.serve.e2b.templates import Build, Template, TemplateList

BUILD_S = 3600.0
READY_S, READY_EVERY_S = 60.0, 0.25
Pull = Callable[[str], Awaitable[Root]]
_COPY = r"""
set -e; cd "$1"; tar -xf archive; rm archive
for source in $2; do
  if [ -d "$source" ]; then mkdir -p "$3"; cp -a "$source/." "$3/"
  elif [ "${3%/}" != "$3" ] || [ -d "$3" ]; then mkdir -p "$3"; cp -a "$source" "$3/"
  else mkdir -p "$(dirname "$3")"; cp -a "$source" "$3"; fi
done
if [ -n "$4" ]; then chown -R "$4" "$3"; fi
if [ -n "$5" ]; then chmod -R "$5" "$3"; fi
"""


class Step(Body, frozen=True, kw_only=True, rename="camel"):
    type: str
    args: list[str] = []
    files_hash: str = ""
    force: bool = False


class BuildStart(Body, frozen=True, kw_only=True, rename="camel"):
    """What a build starts from, and its steps."""

    from_image: str = ""
    from_template: str = ""
    from_image_registry: dict[str, str] | None = None
    force: bool = False
    steps: list[Step] = []
    start_cmd: str = ""
    ready_cmd: str = ""


class StepFailed(Exception):
    """``step`` is its number from 1 on, as clients count."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step, self.message = step, message


@dataclass(slots=True)
class _Site:
    """Where the build stands."""

    session: Session
    build: Build
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "agent"
    folder: str = HOME


class Builder:
    """``pull`` gives the root of an image by name; None: there is no way to images here."""

    def __init__(self, manager: SandboxManager, listed: TemplateList, spec: SandboxSpec, pull: Pull | None) -> None:
        self._manager, self._list, self._spec, self._pull = manager, listed, spec, pull
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, template: Template, build: Build, asked: BuildStart) -> None:
        build.status = "building"
        task = asyncio.ensure_future(self._build(template, build, asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _build(self, template: Template, build: Build, asked: BuildStart) -> None:
        session: Session | None = None
        try:
            async with asyncio.timeout(BUILD_S):
                session = await self._base(build, asked)
                site = _Site(session, build, dict(build.environment), build.user or "agent", build.folder or HOME)
                for number, step in enumerate(asked.steps, 1):
                    await self._step(site, step, str(number))
                build.environment, build.user, build.folder = site.environment, site.user, site.folder
                build.start_command, build.ready_command = asked.start_cmd, asked.ready_cmd
                if asked.start_cmd or asked.ready_cmd:
                    build.say("Starting it once, to see that it gets ready")
                    await start_up(session, build)
                build.snapshot = (await self._manager.snapshot(session.id, name=f"template-{build.id}")).id
            build.say("Build finished")
            self._list.finish(template, build)
        except StepFailed as failure:
            build.status, build.reason, build.failed_step = "error", failure.message, failure.step
        except asyncio.CancelledError:
            build.status, build.reason = "error", "the server ended while it was built"
            raise
        except Exception as error:  # the boundary of a build: whatever went wrong is told to who waits for it
            build.status, build.reason = "error", fault_of(error).message
        finally:
            build.updated_at = time.time()
            if build.status == "error":
                build.say(build.reason, level="error", step=build.failed_step)
            if session is not None:
                await self._manager.kill(session.id)
            self._list.save()

    async def _base(self, build: Build, asked: BuildStart) -> Session:
        life = Life(lifetime_s=BUILD_S, metadata={"tandem.build": build.id})
        spec, root, snapshot = self._spec, None, ""
        if asked.from_image:
            if self._pull is None:
                raise StepFailed("0", f"no way to image {asked.from_image} on this server; build from a template")
            build.say(f"FROM {asked.from_image}", step="base")
            root = await self._pull(asked.from_image)
        elif asked.from_template and (found := self._list.find(asked.from_template)) is not None:
            below = found[1]
            build.say(f"FROM template {asked.from_template}", step="base")
            snapshot, build.base = below.snapshot, below.base
            build.environment, build.user, build.folder = dict(below.environment), below.user, below.folder
        return await self._manager.create(replace(spec), life=life, root=root, snapshot=snapshot)

    async def _step(self, site: _Site, step: Step, number: str) -> None:
        kind, args = step.type.upper(), step.args
        site.build.say(f"[{number}] {kind} {' '.join(args)}"[:500], step=number)
        match kind:
            case "ENV":
                site.environment.update(zip(args[::2], args[1::2], strict=False))
            case "USER":
                site.user = _user(args[0]) if args else "agent"
            case "WORKDIR":
                site.folder = str(PurePosixPath(site.folder, args[0]))
                await self._run(site, f"mkdir -p {shlex.quote(site.folder)}", "root", number, folder="/")
            case "RUN":
                user = _user(args[1]) if len(args) > 1 and args[1] else site.user
                await self._run(site, args[0], user, number)
            case "COPY":
                await self._copy(site, step, number)
            case _:
                raise StepFailed(number, f"no step {kind}: COPY, RUN, ENV, WORKDIR and USER are known")

    async def _run(
        self, site: _Site, command: str, user: str, number: str, *, folder: str = "", arguments: tuple[str, ...] = ()
    ) -> None:
        box = await site.session.use()
        process = await box.start(Start(
            arguments=["/bin/sh", "-c", command, "step", *arguments], folder=folder or site.folder,
            environment=site.environment, user=user,
        ))  # fmt: skip
        held = ""
        async for piece in process.output(from_start=True):
            *lines, held = (held + piece.data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                site.build.say(line, step=number)
        if held:
            site.build.say(held, step=number)
        outcome = await process.wait()
        if outcome.code != 0:
            why = " (out of memory)" if outcome.oom_killed else ""
            raise StepFailed(number, f"step {number} ended with code {outcome.code}{why}: {command.strip()[:200]}")

    async def _copy(self, site: _Site, step: Step, number: str) -> None:
        if len(step.args) < 2:
            raise StepFailed(number, "COPY takes a source and a destination")
        archive = self._list.archive(step.files_hash)
        if not archive.is_file():
            raise StepFailed(number, f"the files of COPY {step.args[0]} were not uploaded")
        source, destination = step.args[0], step.args[1]
        owner = step.args[2] if len(step.args) > 2 else ""
        mode = step.args[3] if len(step.args) > 3 else ""
        if not destination.startswith("/"):
            destination = f"{site.folder}/{destination}"
        scratch = f"/tmp/.copy-{number}"
        await self._run(site, 'rm -rf "$1"; mkdir -m 1777 "$1"', "root", number, folder="/", arguments=(scratch,))
        data = await asyncio.to_thread(archive.read_bytes)
        await site.session.files.write(f"{scratch}/archive", data)
        words = (scratch, source, destination, _owner(owner), mode)
        await self._run(site, _COPY, "root", number, folder="/", arguments=words)
        await self._run(site, 'rm -rf "$1"', "root", number, folder="/", arguments=(scratch,))


async def start_up(session: Session, build: Build) -> None:
    """Run a template's start command in a box of it, and wait until its ready command ends well.

    Raises:
        StepFailed: it was not ready in ``READY_S``.
    """
    box = await session.use()

    async def run(command: str) -> int | None:
        process = await box.start(Start(
            arguments=["/bin/sh", "-c", command], environment=build.environment, user=build.user or "agent",
            folder=build.folder or HOME, timeout_s=READY_S,
        ))  # fmt: skip
        return (await process.wait()).code

    if build.start_command:
        await box.start(Start(
            arguments=["/bin/sh", "-c", build.start_command], environment=build.environment,
            user=build.user or "agent", folder=build.folder or HOME,
        ))  # fmt: skip
    if build.ready_command:
        deadline = time.monotonic() + READY_S
        while await run(build.ready_command) != 0:
            if time.monotonic() > deadline:
                raise StepFailed("finalize", f"not ready in {READY_S:g} s: {build.ready_command[:200]}")
            await asyncio.sleep(READY_EVERY_S)


def _user(name: str) -> str:
    return "root" if name == "root" else "agent"


def _owner(name: str) -> str:
    """Clients' ``user`` is our ``agent``; a numeric or other owner is taken as it is."""
    return {"user": "agent:agent", "": "", "user:user": "agent:agent"}.get(name, name)
