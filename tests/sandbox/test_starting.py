"""A template's commands run in every box of it, and one that is never ready leaves no box."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.boxes import SandboxSpec
from tandem.core.errors import SandboxError
from tandem.record.sinks.nowhere import NowhereSink
from tandem.sandbox import starting
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.images.templates import Template
from tandem.sandbox.manager import SandboxManager

SLOW_START = "sleep 0.3; echo $WORD > up; exec sleep 60"


def manager_of(folder: Path, ready: str) -> SandboxManager:
    if os.geteuid() != 0:
        pytest.skip("boxes of images as root only")
    library = ImageLibrary(folder)
    made = Template(build_id="b", layers=[], host_base=True, start_command=SLOW_START, ready_command=ready)
    made.config.environment["WORD"] = "there"
    library.index.put(made, "service:1")
    return SandboxManager(SandboxSection(warm=0), NowhereSink(), templates=library)


def test_a_box_is_given_out_when_its_service_is_ready(tmp_path: Path) -> None:
    async def main() -> None:
        manager = manager_of(tmp_path, "test -s up")
        try:
            await manager.check(SandboxSpec(template="service:1"))
            for _ in range(2):
                session = await manager.create(SandboxSpec(template="service:1"))
                said = await session.commands.run("cat up; ps ax | grep -c '[s]leep 60'", timeout_s=10)
                assert said.stdout == "there\n1\n"
        finally:
            await manager.close()

    asyncio.run(main())


def test_one_that_is_never_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "READY_S", 0.5)

    async def main() -> None:
        manager = manager_of(tmp_path, "test -e never")
        try:
            with pytest.raises(SandboxError, match="was not ready in 0.5 s: test -e never"):
                await manager.create(SandboxSpec(template="service:1"))
            assert not manager.live
        finally:
            await manager.close()

    asyncio.run(main())
