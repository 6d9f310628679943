"""The remote backend: boxes of any E2B-compatible service, through E2B's own SDK.

Owns: the service's address and key, and that no box of ours is left at the service after ``close``. Refuses: what the
protocol cannot carry: local image layers, network policies, terminals, ports other than HTTP. What a box may use
(memory, CPUs, disk) is the service's template's; how it isolates, what the recipe says of the service.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import Isolation, SandboxSpec
from tandem.core.errors import ConfigError, SandboxTimeout, SandboxUnavailable
from tandem.sandbox.abilities import Ability, refuse
from tandem.sandbox.backend import Box, Root
from tandem.sandbox.backends.remote_box import RemoteBox
from tandem.sandbox.backends.remote_errors import e2b, remote_errors
from tandem.sandbox.backends.remote_frozen import snapshot_of

REQUEST_TIMEOUT_S = 30.0
INSTALL = "pip install 'tandem-rl[remote]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where boxes come from. ``url`` '': E2B's own. ``key`` is shown nowhere."""

    url: str = ""
    box_url: str = ""
    key: str = field(repr=False)
    template: str = "base"

    @property
    def options(self) -> dict[str, Any]:
        """What every call of the SDK is told."""
        told: dict[str, Any] = {"api_key": self.key, "request_timeout": REQUEST_TIMEOUT_S, "debug": False}
        if self.url:
            told |= {"api_url": self.url.rstrip("/"), "sandbox_url": (self.box_url or self.url).rstrip("/")}
        return told


class RemoteBackend:
    """Boxes elsewhere. They end with ``close``, else by the lifetime that the service was told."""

    name = "remote"
    abilities = frozenset({Ability.PAUSE, Ability.SNAPSHOT, Ability.PROCESSES, Ability.USAGE})

    def __init__(self, service: Service, *, isolation: Isolation = Isolation.SHARED_KERNEL) -> None:
        self.isolation = isolation
        self._service = service
        self._boxes: set[RemoteBox] = set()
        self._marks = Path(tempfile.mkdtemp(prefix="tandem-remote-"))

    async def create(self, spec: SandboxSpec, *, root: Root | None = None, timeout_s: float) -> Box:
        """The network is closed: a service that cannot close it must be told so by its own rules."""
        if not spec.network.none:
            raise refuse(self.name, Ability.NETWORK)
        if root is None or (root.host_base and not root.layers):
            template = self._service.template if spec.template == "host" else spec.template
        elif (template := snapshot_of(root)) == "":
            raise refuse(self.name, Ability.IMAGES)
        what = f"no box of template {template!r} from {self._service.url or 'E2B'}"
        try:
            async with asyncio.timeout(timeout_s):
                with remote_errors(what):
                    made = await e2b().AsyncSandbox.create(
                        template=template, timeout=math.ceil(spec.limits.lifetime_s), envs=dict(spec.environment),
                        allow_internet_access=False, metadata=_owner(), **self._service.options,
                    )  # fmt: skip
                box = RemoteBox(made, spec, self._marks, self._forget)
                self._boxes.add(box)
                box.gone.add_done_callback(lambda _: self._boxes.discard(box))
                try:
                    await box.prepare()
                except BaseException:
                    await box.kill()
                    raise
        except TimeoutError as error:
            raise SandboxTimeout(f"{what}: not there after {timeout_s:g} s") from error
        return box

    async def _forget(self, snapshot: str) -> None:
        await e2b().AsyncSandbox.delete_snapshot(snapshot, **self._service.options)

    async def restore(self, frozen: Path, spec: SandboxSpec, *, timeout_s: float) -> Box:
        raise refuse(self.name, Ability.LIVE_SNAPSHOT)

    async def adopt(self) -> dict[str, Box]:
        return {}

    async def leave(self) -> None:
        await self.close()

    async def close(self) -> None:
        """Raises SandboxError: the service does not answer; its boxes end by their lifetime."""
        ends = await asyncio.gather(*(box.kill() for box in list(self._boxes)), return_exceptions=True)
        shutil.rmtree(self._marks, ignore_errors=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def make(section: SandboxSection, state: Path | None) -> RemoteBackend:
    """The backend as a recipe names it.

    Raises:
        SandboxUnavailable: E2B's SDK is not installed. ConfigError: there is no key.
    """
    remote = section.remote
    if importlib.util.find_spec("e2b") is None:
        raise SandboxUnavailable("the remote backend speaks through E2B's SDK, which is not installed", hint=INSTALL)
    key = os.environ.get(remote.key_variable, "")
    if not key:
        raise ConfigError(
            f"the environment variable {remote.key_variable} (sandbox.remote.key_variable) holds no key",
            hint=f"export {remote.key_variable}=...; a server of ours prints its key when it starts",
        )
    service = Service(url=remote.url, box_url=remote.box_url, key=key, template=remote.template)
    return RemoteBackend(service, isolation=Isolation[remote.isolation.upper()])


def _owner() -> dict[str, str]:
    """By which people find our boxes at the service."""
    return {"tandem.host": os.uname().nodename, "tandem.pid": str(os.getpid())}
