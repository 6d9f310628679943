"""Builds templates that clients ask for: their steps go to the library of images, their logs come back.

Owns: the builds that run. Invariant: a build ends ready, or
with the reason why not.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

from tandem.core.boxes import SandboxSpec
from tandem.core.errors import TandemError
from tandem.sandbox.images.library import BuildRequest, ImageLibrary
from tandem.sandbox.images.steps import Step
from tandem.sandbox.images.templates import HOST
from tandem.sandbox.manager import SandboxManager
from tandem.serve.e2b.faults import Fault, fault_of
from tandem.serve.e2b.shapes import Body
from tandem.serve.e2b.templates import Build, Template, TemplateList

BUILD_S = 3600.0
_STEP = re.compile(r"\b[Ss]tep (\d+)")


class BuildStart(Body, frozen=True, kw_only=True, rename="camel"):
    """What a build starts from, and its steps."""

    from_image: str = ""
    from_template: str = ""
    from_image_registry: dict[str, str] | None = None
    force: bool = False
    steps: list[Step] = []
    start_cmd: str = ""
    ready_cmd: str = ""
    warm: list[str] = []  # ours, not E2B's: modules of Python


class Builder:
    """``spec`` bounds the boxes in which steps run; ``aliases`` are names of the server's own template."""

    def __init__(
        self,
        manager: SandboxManager,
        listed: TemplateList,
        library: ImageLibrary,
        spec: SandboxSpec,
        aliases: dict[str, str],
    ) -> None:
        self._manager, self._list, self._library = manager, listed, library
        self._spec, self._aliases = spec, aliases
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, template: Template, build: Build, asked: BuildStart) -> None:
        """Raises: Fault 400: credentials of a registry (they belong into the server's settings)."""
        if asked.from_image_registry:
            raise Fault(400, "fromImageRegistry: credentials are not taken from clients here")
        build.status = "building"
        task = asyncio.ensure_future(self._build(template, build, asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _build(self, template: Template, build: Build, asked: BuildStart) -> None:
        loop = asyncio.get_running_loop()
        limits = self._spec.limits
        request = BuildRequest(
            names=[f"{template.name}:{tag}" for tag in build.wanted_tags],
            steps=asked.steps,
            base=self._base(asked),
            uploads=self._list.archive,
            fresh=asked.force,
            spec=replace(
                self._spec,
                limits=replace(
                    limits, cpus=float(build.cpu_count) or limits.cpus,
                    memory_bytes=build.memory_mb * 2**20 or limits.memory_bytes,
                ),
            ),
            start_command=asked.start_cmd,
            ready_command=asked.ready_cmd,
            warm=asked.warm,
        )  # fmt: skip

        def hear(line: str) -> None:
            loop.call_soon_threadsafe(build.say, line)

        try:
            async with asyncio.timeout(BUILD_S):
                await self._library.build(
                    request, self._manager.backend, build_id=build.id, on_line=hear
                )
            build.say("Build finished")
            self._list.finish(template, build)
        except asyncio.CancelledError:
            build.status, build.reason = "error", "the server ended while it was built"
            raise
        except Exception as error:  # the boundary of a build: whatever went wrong is told to who waits for it
            build.status, build.reason = "error", fault_of(error).message
            named = _STEP.search(error.message if isinstance(error, TandemError) else "")
            build.failed_step = named[1] if named else ""
            build.say(build.reason, level="error", step=build.failed_step)
        finally:
            build.updated_at = time.time()
            self._list.save()

    def _base(self, asked: BuildStart) -> str:
        if asked.from_image:
            return asked.from_image
        name = asked.from_template or HOST
        found = self._list.find(name)
        return f"{found[0].name}:{found[1].id}" if found else self._aliases.get(name, name)
