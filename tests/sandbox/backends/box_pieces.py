"""What the tests of boxes share: a backend that ends with its test, and shell calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tandem.core.boxes import SandboxLimits, SandboxSpec
from tandem.sandbox.backend import Box, Call
from tandem.sandbox.backends.mounts import MountChoice, MountWay
from tandem.sandbox.backends.namespace import NamespaceBackend

OLDER = (MountWay.ATTACHED, MountWay.STRING)

SPEC = SandboxSpec(limits=SandboxLimits(memory_bytes=128 * 2**20, disk_bytes=16 * 2**20))


def shell(text: str, timeout_s: float = 20.0) -> Call:
    return Call(arguments=["/bin/sh", "-c", text], timeout_s=timeout_s, stdout_cap_bytes=4096, stderr_cap_bytes=4096)


async def said(box: Box, text: str) -> str:
    """What a shell line prints; it must end well."""
    outcome = await box.call(shell(text))
    assert outcome.code == 0, outcome
    return outcome.stdout.decode().strip()


@contextlib.asynccontextmanager
async def backend(
    state_folder: Path | None = None, mounts: MountChoice | None = None
) -> AsyncIterator[NamespaceBackend]:
    made = NamespaceBackend(state_folder=state_folder, mounts=mounts)
    try:
        yield made
    finally:
        await made.close()
